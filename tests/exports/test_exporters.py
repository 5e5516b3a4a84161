from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import debubble as db
from debubble.costs.partition import partition_named
from debubble.exports import exports
from debubble.exports.layers import stage_layers
from debubble.frameworks.megatron.export import FSDP_REMARK, MUON_DIVIDED, layout
from debubble.ir import CandidateSummary, ExportError, Kind, Op, PlannedUnit, Schedule
from debubble.models import Model
from debubble.planners.model_problem import half_layers
from debubble.plans import Plan
from tests.exports.hand_plans import (
    LLAMA,
    MIXTRAL,
    full,
    interleaved,
    offloading,
    one_f_one_b,
    plan,
    priced,
    with_operations,
)
from tests.support.model_cases import on_cpus

LINEAR = db.Placement.linear(2)
SPLIT = Schedule.of(
    "mine", LINEAR, 2, [["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]]
)  # fmt: skip


class CountedLayer(torch.nn.Linear):
    """A layer that records its forwards."""

    def __init__(self, index: int, forwards: list[int]) -> None:
        super().__init__(2, 2)
        self.index, self.forwards = index, forwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.append(self.index)
        return super().forward(x)


class TestMegatron:
    def test_the_layout_names_every_layer_once(self) -> None:
        stages = stage_layers(one_f_one_b([6, 9, 9, 8]), target="test")

        assert layout(stages) == "Et*6|(t*9|)*2t*8L"

    def test_the_layout_of_chunks_is_in_model_order(self) -> None:
        stages = stage_layers(interleaved([3, 1, 2, 0]), target="test")

        assert layout(stages) == "Et*3|t|t*2|L"

    def test_file_is_a_bash_array_of_arguments(self, tmp_path: Path) -> None:
        words = sourced(priced(full(0, 2), data=2, tensor=2, zero=1), tmp_path)

        assert words == [
            "--num-layers", "4",
            "--pipeline-model-parallel-size", "2",
            "--pipeline-model-parallel-layout", "Et*2|t*2L",
            "--micro-batch-size", "1",
            "--seq-length", "4096",
            "--tensor-model-parallel-size", "2",
            "--sequence-parallel",
            "--global-batch-size", "16",
            "--context-parallel-size", "1",
            "--use-distributed-optimizer",
            "--optimizer", "adam",
            "--bf16",
            "--attention-backend", "auto",
            "--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1",
        ]  # fmt: skip

    def test_plan_without_a_model_exports_no_sizes(self, tmp_path: Path) -> None:
        words = sourced(one_f_one_b([2, 2]), tmp_path)

        assert [word for word in words if word.startswith("--")] == [
            "--num-layers",
            "--pipeline-model-parallel-size",
            "--pipeline-model-parallel-layout",
        ]

    def test_multi_token_prediction_layers_are_counted(self, tmp_path: Path) -> None:
        units = one_f_one_b([2, 2])
        *layers, head = units.partition[1]
        words = sourced(
            replace(units, partition=(units.partition[0], (*layers, PlannedUnit("mtp", 0), head))), tmp_path
        )

        assert words[words.index("--mtp-num-layers") + 1] == "1"
        assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*2|t*2mL"

    def test_equal_full_layers_per_stage_lose_nothing(self, tmp_path: Path) -> None:
        made = exports["megatron"](priced(full(0, 2)))

        assert made.losses == ()

    def test_most_recomputing_stage_decides_at_a_predicted_price(self) -> None:
        made = exports["megatron"](priced(full(0, 1, 2)))
        slowed = float(priced(full(0, 1, 2, 3)).simulate().makespan / priced(full(0, 1, 2)).simulate().makespan)

        assert "--recompute-num-layers 2" in made.files["megatron-arguments.sh"]
        assert slowed > 1.01
        (loss,) = made.losses
        assert loss.startswith("Megatron-LM recomputes equally many whole layers in every stage: here the first 2; ")
        assert float(loss.split("predicted to take ")[1].split()[0]) == pytest.approx(slowed, abs=0.02)

    def test_the_attention_core_everywhere_is_selective(self) -> None:
        made = exports["megatron"](priced(lambda layer: ("core", "none")))

        assert "--recompute-modules core_attn\n" in made.files["megatron-arguments.sh"]
        assert made.losses == ()

    def test_norms_fused_by_transformer_engine_recompute_with_mlp(self) -> None:
        """In its dense layers `layernorm` does nothing, and `mlp` recomputes more than both norms."""
        made = exports["megatron"](priced(lambda layer: ("norm", "norm")))

        assert "--recompute-modules mlp\n" in made.files["megatron-arguments.sh"]
        assert made.losses[0].startswith("Megatron-LM recomputes the same modules in every layer: here mlp; ")

    def test_layers_with_experts_recompute_by_modules_of_experts(self) -> None:
        """`mlp` does nothing in them."""
        made = exports["megatron"](priced(lambda layer: ("none", "norm+mlp"), config=MIXTRAL))

        assert "--recompute-modules layernorm moe\n" in made.files["megatron-arguments.sh"]
        assert made.losses == ()

    def test_unpriced_modules_must_cover_the_planned_ones(self) -> None:
        covered = exports["megatron"](one_f_one_b([2, 2], lambda layer: ("core", "activation")))
        uncovered = exports["megatron"](one_f_one_b([2, 2], lambda layer: ("norm", "activation")))

        assert "--recompute-modules core_attn mlp\n" in covered.files["megatron-arguments.sh"]
        assert "--recompute-num-layers 2\n" in uncovered.files["megatron-arguments.sh"]
        assert uncovered.losses[-1].endswith("how much slower that is, the plan's costs do not say.")


def sourced(plan: Plan, folder: Path) -> list[str]:
    """The words of the array in a plan's file, as bash reads them."""
    (folder / "arguments.sh").write_text(exports["megatron"](plan).files["megatron-arguments.sh"])
    script = 'source arguments.sh && printf "%s\\n" "${DEBUBBLE_ARGS[@]}"'
    return subprocess.run(["bash", "-c", script], cwd=folder, check=True, capture_output=True, text=True).stdout.split()


class TestMindFormers:
    def test_offsets_are_the_excess_over_an_even_share(self) -> None:
        made = exports["mindformers"](interleaved([3, 3, 3, 2, 3, 3, 3, 2], order="interleaved-less-memory"))
        config = yaml.safe_load(made.files["plan.yaml"])

        model = config["model"]["model_config"]
        assert model["offset"] == [[1, 1, 1, 0], [1, 1, 1, 0]]
        assert sum(map(sum, model["offset"])) == model["num_layers"] % 8
        assert model["pp_interleave_num"] == 2
        assert config["parallel"]["pipeline_config"]["pipeline_interleave"] is True

    def test_recomputation_is_counted_per_chunk_and_device(self) -> None:
        made = exports["mindformers"](interleaved([2, 2, 2, 2], full(0, 4, 5), order="interleaved-less-memory"))

        assert yaml.safe_load(made.files["plan.yaml"])["recompute_config"]["recompute"] == [[1, 0], [2, 0]]
        assert made.losses == ()

    def test_patterns_cover_the_full_layers_before_them(self) -> None:
        strategy = {0: ("full", "full"), 1: ("norm", "activation+multiply"), 2: ("none", "none")}
        made = exports["mindformers"](one_f_one_b([3, 1], lambda layer: strategy.get(layer, ("none", "none"))))

        config = yaml.safe_load(made.files["plan.yaml"])["recompute_config"]
        assert config["recompute"] == [1, 0]
        assert config["select_recompute"] == {
            r"attention_norm\.norm": [2, 0],
            r"input_layernorm": [2, 0],
            r"feed_forward\.w1\.activation\.silu": [2, 0],
            r"mlp\.activation_func\.silu": [2, 0],
            r"feed_forward\.mul": [2, 0],
            r"mlp\.mul": [2, 0],
        }

    def test_degrees_zero_and_sizes_are_written(self) -> None:
        made = exports["mindformers"](priced(config=MIXTRAL, tensor=2, data=2, expert=2, zero=2, micro_batch_size=3))

        config = yaml.safe_load(made.files["plan.yaml"])
        assert config["parallel_config"] == {
            "pipeline_stage": 2,
            "micro_batch_num": 8,
            "model_parallel": 2,
            "use_seq_parallel": True,
            "data_parallel": 2,
            "context_parallel": 1,
            "expert_parallel": 2,
        }
        assert config["parallel"]["enable_parallel_optimizer"] is True
        assert config["parallel"]["parallel_optimizer_config"] == {"gradient_accumulation_shard": True}
        assert config["runner_config"] == {"batch_size": 3}
        assert made.losses == ()


class StandIn:
    """Imitates what PipelineModule does with its layers on one stage, as far as the plan's subclass uses it."""

    stage_id = 0

    def __init__(
        self, layers: list[str], num_stages: int, loss_fn: object, activation_checkpoint_interval: int
    ) -> None:
        self.num_stages = num_stages
        self._partition_layers()
        self.forward_funcs = layers[self.bounds[0] : self.bounds[1]]
        self.activation_checkpoint_interval = activation_checkpoint_interval

    def _partition_layers(self, method: str = "uniform") -> None:
        raise NotImplementedError

    def _set_bounds(self, start: int, stop: int) -> None:
        self.bounds = start, stop

    def _is_checkpointable(self, funcs: list[str]) -> bool:
        raise NotImplementedError

    def checkpointed(self) -> list[str]:
        """Layers that a forward checkpoints."""
        interval = self.activation_checkpoint_interval
        return [layer for layer in self.forward_funcs if interval and self._is_checkpointable([layer])]


class TestDeepSpeed:
    @pytest.mark.parametrize(
        ("stage", "forwards", "checkpointed"),
        [
            (0, ["embedding", "layer 0", "layer 1"], ["layer 1"]),
            (1, ["layer 2", "layer 3", "layer 4", "head"], ["layer 2", "layer 4"]),
        ],
    )
    def test_stages_checkpoint_exactly_the_planned_layers(
        self, stage: int, forwards: list[str], checkpointed: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = exports["deepspeed"](one_f_one_b([2, 3], full(1, 2, 4)))
        package, pipe = ModuleType("deepspeed"), ModuleType("deepspeed.pipe")
        pipe.PipelineModule = type("PipelineModule", (StandIn,), {"stage_id": stage})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "deepspeed", package)
        monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)
        scope: dict[str, Any] = {}
        exec(compile(made.files["planned_pipeline.py"], "planned_pipeline.py", "exec"), scope)

        layers = ["embedding", *(f"layer {i}" for i in range(5)), "head"]
        module = scope["PlannedPipeline"](layers, loss_fn=None)

        assert module.num_stages == 2
        assert module.forward_funcs == forwards
        assert module.checkpointed() == checkpointed
        assert made.losses == ()

    def test_layers_of_one_stage_may_recompute_differently(self) -> None:
        made = exports["deepspeed"](priced(full(1)))

        assert made.losses == (
            "Sequences of 4096 tokens: DeepSpeed takes them as your data loader gives them.",
            "Optimizer adamw: give it to DeepSpeed; the plan's memory counts on its states.",
        )

    def test_the_config_has_the_batch_and_zero_level(self) -> None:
        made = exports["deepspeed"](priced(data=2, zero=1, micro_batch_size=3))

        assert json.loads(made.files["ds_config.json"]) == {
            "gradient_accumulation_steps": 8,
            "train_micro_batch_size_per_gpu": 3,
            "train_batch_size": 48,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
        }

    def test_custom_host_optimizer_is_allowed_for_deepspeed(self) -> None:
        made = exports["deepspeed"](priced(data=2, zero=1, host_optimizer=1, optimizer="momentum"))

        config = json.loads(made.files["ds_config.json"])
        assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
        assert (config["zero_force_ds_cpu_optimizer"], config["zero_allow_untested_optimizer"]) == (False, True)
        assert "Optimizer momentum: give it to DeepSpeed; the plan's memory counts on its states." in made.losses

    def test_one_rank_sums_gradients_in_bf16_with_zero_as_planned(self) -> None:
        config = json.loads(exports["deepspeed"](priced(framework="deepspeed")).files["ds_config.json"])

        assert config["zero_optimization"] == {"stage": 1}

    @pytest.mark.parametrize(
        ("layers", "framework", "message"),
        [
            ((2, 2), "deepspeed", "a DeepSpeed pipeline keeps gradients twice"),
            ((4,), "deepspeed", "Before 0.17.6 DeepSpeed sums gradients in fp32 without ZeRO"),
            ((4,), "deepspeed,gradient_bytes=4", "DeepSpeed sums gradients in bf16 without ZeRO from 0.17.6 on"),
        ],
    )
    def test_different_gradients_without_zero_are_reported(
        self, layers: tuple[int, ...], framework: str, message: str
    ) -> None:
        losses = exports["deepspeed"](priced(layers=layers, data=2, framework=framework)).losses

        assert any(message in loss for loss in losses)

    def test_fp32_gradients_are_requested_where_priced(self) -> None:
        written = exports["deepspeed"](priced(framework="deepspeed,gradient_bytes=4")).files["ds_config.json"]
        config = json.loads(written)

        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
        assert config["bf16"] == {"enabled": True, "immediate_grad_update": True}
        assert config["zero_optimization"] == {"stage": 1}

    def test_checkpoints_after_a_frozen_embedding_do_not_reenter(self) -> None:
        made = exports["deepspeed"](priced(full(0), lora=8))

        assert json.loads(made.files["ds_config.json"])["pipeline"] == {"use_reentrant": False}

    def test_config_without_a_pipeline_has_any_zero_stage(self) -> None:
        made = exports["deepspeed"](priced(full(1, 2), layers=(4,), data=2, zero=3))

        assert sorted(made.files) == ["ds_config.json", "planned_layers.py"]
        assert "RECOMPUTED_LAYERS = {1, 2}" in made.files["planned_layers.py"]
        layer = Model.from_hf({**LLAMA, "num_hidden_layers": 4}).layer_parameters(0)
        assert json.loads(made.files["ds_config.json"])["zero_optimization"] == {
            "stage": 3,
            "stage3_max_live_parameters": 2 * layer,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": layer,
        }

    def test_the_function_recomputes_the_planned_layers_alone(self) -> None:
        module: dict[str, Any] = {}
        made = exports["deepspeed"](priced(full(1), layers=(4,), data=2, zero=2))
        exec(made.files["planned_layers.py"], module)
        forwards: list[int] = []
        layers = [CountedLayer(index, forwards) for index in range(4)]

        module["recompute"](layers)
        torch.nn.Sequential(*layers)(torch.ones(1, 2, requires_grad=True)).sum().backward()

        assert forwards == [0, 1, 2, 3, 1]


class TestTorchHosts:
    def test_without_a_pipeline_micro_batches_are_accumulated(self) -> None:
        plan = priced(layers=(4,), data=2, zero=3, micro_batch_size=3)
        titan, automodel = exports["torchtitan"](plan), exports["automodel"](plan)

        assert list(titan.files) == ["plan.py", "plan.toml"]
        assert "MODULES = None" in titan.files["plan.py"]
        assert "'fsdp_reshard_after_forward': 'always'" in titan.files["plan.py"]
        assert list(automodel.files) == ["plan.yaml"]
        recipe = yaml.safe_load(automodel.files["plan.yaml"])
        assert recipe["step_scheduler"] == {"local_batch_size": 3, "global_batch_size": 48}
        assert recipe["distributed"]["reshard_after_forward"] is True
        assert recipe["distributed"]["defer_fsdp_grad_sync"] is False
        assert "pipeline" not in recipe["distributed"]

    def test_automodel_gathers_weights_again_with_sharded_experts(self) -> None:
        plan = priced(layers=(4,), data=2, expert=2, zero=3, config=MIXTRAL)
        recipe = yaml.safe_load(exports["automodel"](plan).files["plan.yaml"])

        assert recipe["distributed"]["moe"] == {"reshard_after_forward": True}

    def test_extra_torchtitan_reductions_are_reported_with_price(self) -> None:
        made = exports["torchtitan"](priced(layers=(4,), data=2, zero=1))

        assert "'fsdp_reshard_after_forward': 'never'" in made.files["plan.py"]
        assert made.losses[0] == (
            "torchtitan divides model states as ZeRO-2 without a pipeline, not as ZeRO-1, which takes less memory than"
            " planned."
        )
        assert "times as long" in made.losses[1]

    def test_the_recipe_names_the_modules_of_every_stage(self) -> None:
        made = exports["torchtitan"](one_f_one_b([1, 2], full(1)))

        text = made.files["plan.py"]
        compile(text, "plan.py", "exec")
        assert "[['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]" in text
        assert "RECOMPUTED_LAYERS = {1}" in text
        assert made.files["schedule.csv"].startswith("0F0,0F1,0B0,")

    @pytest.mark.parametrize(
        ("framework", "compiling"),
        [
            ("torchtitan", "{'enable': True}"),
            ("torchtitan@2024.06", "{'enable': False}"),
            ("torchtitan,tensor_overlap=true", "{'enable': True, 'enable_async_tensor_parallel': True}"),
        ],
    )
    def test_recipe_compiles_what_is_priced_as_compiled(self, framework: str, compiling: str) -> None:
        made = exports["torchtitan"](priced(tensor=2, framework=framework))

        assert f"COMPILE = {compiling}" in made.files["plan.py"]
        assert not any("times are those of" in loss for loss in made.losses)

    def test_v_placement_is_exported_as_a_v_schedule(self) -> None:
        orders = [[], []]  # type: ignore[var-annotated]
        for j in range(2):
            for kind, stages in ((Kind.F, range(4)), (Kind.B, reversed(range(4)))):
                for s in stages:
                    orders[(0, 1, 1, 0)[s]].append(Op(kind, s, j))
        made = exports["torchtitan"](plan(Schedule.of("v", db.Placement.v_shape(2), 2, orders), [1, 1, 1, 1]))

        assert "'pipeline_parallel_schedule': 'ZBVZeroBubble'" in made.files["plan.py"]

    def test_automodel_has_hf_names_and_one_recompute_switch(self) -> None:
        made = exports["automodel"](priced(full(0), layers=(1, 1)))

        distributed = yaml.safe_load(made.files["plan.yaml"])["distributed"]
        assert distributed["pipeline"]["module_fqns_per_model_part"] == [
            ["model.embed_tokens", "model.layers.0", "model.rotary_emb"],
            ["model.layers.1", "model.norm", "lm_head", "model.rotary_emb"],
        ]
        assert distributed["activation_checkpointing"] is True
        assert any(loss.startswith("NeMo Automodel recomputes all layers or none: here all; ") for loss in made.losses)

    def test_automodel_gets_degrees_batch_and_adapters(self) -> None:
        made = exports["automodel"](
            priced(config=MIXTRAL, data=2, expert=2, tensor=2, zero=1, lora=8, micro_batch_size=3)
        )

        recipe = yaml.safe_load(made.files["plan.yaml"])
        assert recipe["step_scheduler"] == {"local_batch_size": 24, "global_batch_size": 48}
        sizes = {name: size for name, size in recipe["distributed"].items() if name.endswith("_size")}
        assert sizes == {"pp_size": 2, "tp_size": 2, "dp_size": 2, "cp_size": 1, "ep_size": 4}
        assert recipe["distributed"]["sequence_parallel"] is True
        assert recipe["distributed"]["pipeline"]["pp_microbatch_size"] == 3
        assert recipe["model"]["torch_dtype"] == "bfloat16"
        assert recipe["peft"]["dim"] == 8

    @pytest.mark.parametrize(
        "family", ["falcon", "gpt_neox", "granite", "olmo2", "persimmon", "phi", "phi3", "qwen2_moe"]
    )
    def test_the_names_are_those_of_transformers_modules(self, family: str) -> None:
        transformers = pytest.importorskip("transformers", minversion="5")
        torch = pytest.importorskip("torch")
        with torch.device("meta"):
            config = type(transformers.AutoConfig.for_model(family))(num_hidden_layers=2)
            model = transformers.AutoModelForCausalLM.from_config(config)
        units = replace(
            one_f_one_b([1, 1]), model_on_cluster=on_cpus({**config.to_dict(), "tie_word_embeddings": False})
        )
        parts = json.loads(exports["torch"](units).files["modules.json"])
        named = [parameter for stage in parts for name in stage for parameter in model.get_submodule(name).parameters()]

        assert {id(p) for p in named} == {id(p) for p in model.parameters()}

    @pytest.mark.parametrize(
        "entries",
        [
            {"model_type": "falcon"},
            {"model_type": "gpt_neox"},
            {"model_type": "persimmon"},
            {"model_type": "phi"},
            {"model_type": "granite", "embedding_multiplier": 12.0},
            {"model_type": "granite", "logits_scaling": 8.0},
            {"model_type": "gemma2"},
            {"model_type": "gemma3_text"},
            {"model_type": "cohere"},
        ],
    )
    def test_automodel_refuses_models_that_it_computes_differently(self, entries: dict[str, object]) -> None:
        with pytest.raises(ExportError, match="would train another model over a pipeline"):
            exports["automodel"](replace(one_f_one_b([1, 1]), model_on_cluster=on_cpus({**LLAMA, **entries})))

    @pytest.mark.parametrize(
        "model", [{**LLAMA, "tie_word_embeddings": True}, {"model_type": "cohere", "hidden_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 8}],
    )  # fmt: skip
    def test_tied_embeddings_are_refused(self, model: dict[str, object]) -> None:
        tied = replace(one_f_one_b([1, 1]), model_on_cluster=on_cpus(model))

        with pytest.raises(ExportError, match="does not train tied embeddings over a pipeline"):
            exports["torchtitan"](tied)

    def test_fewest_layers_recompute_in_full(self) -> None:
        """Full layers drop more than their modules, so fewer of them are needed."""
        made = exports["torchtitan"](priced(lambda layer: ("none", "norm"), layers=(8, 8)))

        assert "RECOMPUTED_LAYERS = {0, 8}" in made.files["plan.py"]
        assert made.losses[0].startswith(
            "torchtitan does not recompute parts of layers as planned for 16 layers: 2 of them recompute wholly, the"
            " others nothing; the step is predicted to take "
        )

    @pytest.mark.parametrize(
        ("target", "second"),
        [
            ("torch", "1F0,1I0,1W0,1F1,1I1,1W1"),
            ("torchtitan", "1F0,1I0,1W0,1F1,1I1,1W1"),
            ("automodel", "1F0,1B0,1F1,1B1"),  # there, all layers recompute or none
        ],
    )
    def test_a_backward_is_split_unless_it_recomputes(self, target: str, second: str) -> None:
        made = exports[target](priced(full(0), layers=(1, 1), schedule=SPLIT))

        assert made.files["schedule.csv"].splitlines() == ["0F0,0F1,0B0,0B1", second]
        assert any("so they are one B on stage" in loss and "predicted to take" in loss for loss in made.losses)

    @pytest.mark.parametrize(("counted", "warned"), [(False, True), (True, False)])
    def test_memory_until_w_is_reported_unless_counted(self, counted: bool, warned: bool) -> None:
        plan = priced(layers=(1, 1), schedule=SPLIT)
        assert plan.model_on_cluster is not None
        units = half_layers(*plan.model_on_cluster, plan.options, pipeline=2, target="torchtitan")
        costs = units.stage_costs(partition_named(plan.partition, units), plan.schedule.placement)
        made = exports["torchtitan"](replace(plan, costs=costs) if counted else plan)

        assert ("torch's I and W hold more memory in between than the plan counts on" in str(made.losses)) is warned

    def test_half_layers_in_pairs_are_exported_as_layers(self) -> None:
        units = [
            PlannedUnit("embedding", None),
            *(PlannedUnit("layer", i, "full") for i in range(2)),
            PlannedUnit("head", None),
        ]
        halves = one_f_one_b([1, 1], full(0, 1))
        full_layers = replace(halves, partition=(tuple(units[:2]), tuple(units[2:])))

        assert exports["torchtitan"](full_layers) == exports["torchtitan"](halves)
        assert exports["megatron"](full_layers) == exports["megatron"](halves)

    def test_adapters_are_reported(self) -> None:
        for target in ("torchtitan", "megatron"):
            losses = exports[target](priced(lora=8)).losses
            assert losses[0].startswith("LoRA of rank 8: configure adapters of that rank")
        assert "lora 8" in exports["torch"](priced(lora=8)).losses[0]


class TestOffload:
    def test_dropped_offload_is_reported_if_the_plan_fits(self) -> None:
        made = exports["torch"](offloading())

        assert made.files["schedule.csv"] == "0F0,0F1,0B1,0B0\n"
        assert made.losses[:2] == (
            "Offload: all activations stay on their devices, also the 1 to be moved.",
            "With that the step is predicted to take 1.000 times as long.",
        )

    def test_plan_that_needs_offload_to_fit_is_refused(self) -> None:
        needs_it = offloading(memory_limit=1)
        needs_it.simulate()

        with pytest.raises(ExportError, match="torch cannot run this plan, whose memory depends on offload: Device 0"):
            exports["torch"](needs_it)


class TestStates:
    def test_megatron_divides_gradients_and_parameters_with_its_fsdp(self) -> None:
        for zero, strategy in ((2, "optim_grads"), (3, "optim_grads_params")):
            made = exports["megatron"](priced(data=2, zero=zero))
            script = made.files["megatron-arguments.sh"]

            assert made.losses[0] == FSDP_REMARK
            assert "none of Megatron-LM's functional tests runs it with a pipeline" in made.losses[1]

            assert f"--use-megatron-fsdp\n    --data-parallel-sharding-strategy {strategy}\n" in script
            assert "--ckpt-format fsdp_dtensor" in script
            assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in script

    def test_megatron_tensor_parallelism_uses_one_queue_on_hopper(self) -> None:
        script = exports["megatron"](priced(tensor=2)).files["megatron-arguments.sh"]
        assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in script
        assert "CUDA_DEVICE" not in exports["megatron"](priced()).files["megatron-arguments.sh"]

    @pytest.mark.parametrize(("zero", "losses"), [(0, ()), (1, (MUON_DIVIDED,))])
    def test_muon_with_divided_states_needs_a_newer_megatron(self, zero: int, losses: tuple[str, ...]) -> None:
        made = exports["megatron"](priced(data=2, zero=zero, optimizer="muon"))
        assert made.losses == losses
        assert ("--use-distributed-optimizer" in made.files["megatron-arguments.sh"]) == bool(zero)

    def test_megatron_moves_a_share_of_the_states_to_hosts(self) -> None:
        script = exports["megatron"](priced(data=2, zero=1, host_optimizer=0.5)).files["megatron-arguments.sh"]

        assert "--optimizer-cpu-offload\n    --optimizer-offload-fraction 0.5\n" in script
        assert "--use-precision-aware-optimizer\n    --overlap-cpu-optimizer-d2h-h2d\n" in script

    def test_host_states_are_dropped_only_if_memory_suffices(self) -> None:
        one_f_one_b = db.schedules["1f1b"](devices=2, micro_batches=8)
        schedule = with_operations(one_f_one_b, ("0P0", "0F0"), ("0D7", ""), ("0S7", ""))
        limit = float(priced(schedule=schedule, on_host=[0]).simulate().peak_memory[0])

        made = exports["megatron"](priced(schedule=schedule, on_host=[0]))

        assert made.losses[0].startswith("The optimizer states of stages 0 stay on the devices")
        with pytest.raises(ExportError, match="whose memory depends on optimizer states on the host"):
            exports["megatron"](priced(schedule=schedule, on_host=[0], memory_limit=limit))


def halved(candidates: tuple[CandidateSummary, ...] = ()) -> Plan:
    """A plan whose first stage ends within a layer."""
    full_layers = one_f_one_b([1, 1])
    first, second = full_layers.partition
    return replace(full_layers, partition=(first[:-1], (first[-1], *second)), candidates=candidates)


def test_several_slowdowns_are_added_up() -> None:
    made = exports["torchtitan"](priced(lambda layer: ("none", "norm"), layers=(4, 4), schedule=SPLIT))

    timed = [loss for loss in made.losses if "times as long" in loss]
    assert len(timed) == 3
    assert timed[-1].startswith("With all of this the step is predicted to take ")


def test_plan_from_stage_costs_is_refused_where_layers_matter() -> None:
    """They are refused first, as targets that take any order would refuse the plan too."""
    for schedule in (db.schedules["1f1b"], db.schedules["zb-h1"]):
        abstract = replace(
            plan(schedule(devices=2, micro_batches=8), [1, 1]),
            partition=((PlannedUnit("stage", 0),), (PlannedUnit("stage", 1),)),
        )

        with pytest.raises(ExportError, match="names no model layers"):
            exports["megatron"](abstract)
        assert list(exports["torch"](abstract).files) == ["schedule.csv"]


def tight(plan: Plan) -> Plan:
    """The plan on devices with exactly the memory that it needs."""
    return replace(plan, costs=plan.costs.with_limit(list(map(float, plan.simulate().peak_memory))))


REFUSED: dict[str, tuple[Plan, str, str]] = {
    "order": (
        priced(schedule=db.schedules["gpipe"](devices=2, micro_batches=8)), "megatron",
        "runs its own 1f1b or interleaved order, and this plan's 'gpipe'.* plan again with --for megatron, which",
    ),
    "chunks": (interleaved([1, 1, 1, 1]), "deepspeed", "DeepSpeed runs its own 1f1b order"),
    "placement": (
        priced(schedule=db.schedules["hanayo"](devices=2, micro_batches=8, chunks=4), layers=(1,) * 8), "torchtitan",
        r"places stages in a loop, .* and this plan places them as \[0, 1, 1, 0.*plan again with --for torchtitan",
    ),
    "attention": (priced(dtype="fp32"), "megatron", "attention that keeps no scores"),
    "tensor": (priced(tensor=2), "deepspeed", "has no tensor parallelism"),
    "context": (priced(context=2), "deepspeed", "has no context parallelism"),
    "experts": (
        priced(config=MIXTRAL, data=2, expert=2, tensor=4), "torchtitan",
        "4 experts cannot be divided over the 2 expert- x 4 tensor",
    ),
    "ZeRO": (
        tight(priced(data=2, zero=2)), "deepspeed",
        "DeepSpeed cannot run this plan, .* on ZeRO-2: .* plan again with --for deepspeed, which searches",
    ),
    "half of a layer": (
        replace(halved(), model_on_cluster=on_cpus(LLAMA)), "primus",
        "Stage 0 holds only the attention half of layer 0, .*: plan again with --for primus, which searches",
    ),
    "half without a model": (
        halved(), "megatron", r"half of layer 0, .*plan again with --planner dapple\+ .*, or plan a MODEL",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_refusal_explains_how_to_plan_for_the_target(name: str) -> None:
    plan, target, message = REFUSED[name]

    with pytest.raises(ExportError, match=message):
        exports[target](plan)


def test_an_export_writes_its_files_to_a_folder(tmp_path: Path) -> None:
    made = exports["megatron"](priced())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "launch.sh").write_text("old")

    paths = made.write(tmp_path / "out")

    assert {path.name: path.read_text() for path in paths} == made.files
    assert made.write(str(tmp_path / "new"))[0] == tmp_path / "new" / "megatron-arguments.sh"
