from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml

import debubble as db
from debubble.exports import exports
from debubble.exports.layers import stage_layers
from debubble.exports.megatron import layout
from debubble.ir import ExportError, Kind, Op, Plan, PlannedUnit, RunOptions, Schedule, StageCosts

Strategy = Callable[[int], tuple[str, str]]


def plain(layer: int) -> tuple[str, str]:
    return "none", "none"


def full(*chosen: int) -> Strategy:
    return lambda layer: ("full", "full") if layer in chosen else ("none", "none")


def units(layers: list[int], strategy: Strategy = plain) -> tuple[tuple[PlannedUnit, ...], ...]:
    """That many layers per stage, embedding and head at the ends."""
    first = 0
    stages: list[list[PlannedUnit]] = []
    for count in layers:
        stage = []
        for layer in range(first, first + count):
            attention, mlp = strategy(layer)
            stage += [PlannedUnit("attention", layer, attention), PlannedUnit("mlp", layer, mlp)]
        stages.append(stage)
        first += count
    stages[0].insert(0, PlannedUnit("embedding", None))
    stages[-1].append(PlannedUnit("head", None))
    return tuple(map(tuple, stages))


def plan(schedule: Schedule, layers: list[int], strategy: Strategy = plain, **costs: object) -> Plan:
    return Plan(
        planner="hand",
        schedule=schedule,
        costs=StageCosts.of(stages=len(layers), **costs),  # type: ignore[arg-type]
        lower_bound=0,
        partition=units(layers, strategy),
        model={"tie_word_embeddings": False},
    )


def one_f_one_b(layers: list[int], strategy: Strategy = plain, **costs: object) -> Plan:
    return plan(db.schedules["1f1b"](devices=len(layers), micro_batches=8), layers, strategy, **costs)


def interleaved(layers: list[int], strategy: Strategy = plain) -> Plan:
    devices = len(layers) // 2
    return plan(db.schedules["interleaved"](devices=devices, micro_batches=8, chunks=2), layers, strategy)


def offloading(**costs: object) -> Plan:
    """Two forwards of one stage, the first of which is offloaded until its backward."""
    names = ["0F0", "0O0", "0F1", "0B1", "0L0", "0B0"]
    return plan(Schedule.of("mine", db.Placement.linear(1), 2, [names]), [2], offload=1, **costs)


class TestMegatron:
    def test_the_layout_names_every_layer_once(self) -> None:
        stages = stage_layers(one_f_one_b([6, 9, 9, 8]), target="test")

        assert layout(stages) == "Et*6|(t*9|)*2t*8L"

    def test_the_layout_of_chunks_is_in_model_order(self) -> None:
        stages = stage_layers(interleaved([3, 1, 2, 0]), target="test")

        assert layout(stages) == "Et*3|t|t*2|L"

    def test_the_arguments_say_how_large_a_step_is(self) -> None:
        arguments = exports["megatron"](one_f_one_b([2, 2])).files["megatron-arguments.txt"].splitlines()

        assert "--num-layers 4" in arguments
        assert "--global-batch-size 8" in arguments
        assert "--pipeline-model-parallel-size 2" in arguments

    def test_equally_many_whole_layers_per_stage_lose_nothing(self) -> None:
        made = exports["megatron"](one_f_one_b([3, 3], full(0, 3)))

        assert "--recompute-granularity full --recompute-method block --recompute-num-layers 1" in str(made.files)
        assert made.losses == ()

    def test_the_stage_that_needs_most_decides_for_all(self) -> None:
        made = exports["megatron"](one_f_one_b([3, 3], full(0, 1, 3)))

        assert "--recompute-num-layers 2" in str(made.files)
        assert "more than planned, and slower, on stage 1." in made.losses[0]

    def test_the_same_modules_everywhere_are_selective(self) -> None:
        made = exports["megatron"](one_f_one_b([2, 2], lambda layer: ("norm+core", "norm")))

        assert "--recompute-granularity selective --recompute-modules core_attn layernorm" in str(made.files)
        assert made.losses == ()

    def test_another_order_is_refused(self) -> None:
        with pytest.raises(ExportError, match="runs its own 1f1b or interleaved order, and this plan's 'zb-h1'"):
            exports["megatron"](plan(db.schedules["zb-h1"](devices=2, micro_batches=4), [2, 2]))


class TestMindFormers:
    def test_offsets_are_what_a_chunk_has_more_than_its_even_share(self) -> None:
        config = yaml.safe_load(exports["mindformers"](interleaved([3, 3, 3, 2, 3, 3, 3, 2])).files["plan.yaml"])

        model = config["model"]["model_config"]
        assert model["offset"] == [[1, 1, 1, 0], [1, 1, 1, 0]]
        assert sum(map(sum, model["offset"])) == model["num_layers"] % 8
        assert model["pp_interleave_num"] == 2
        assert config["parallel"]["pipeline_config"]["pipeline_interleave"] is True

    def test_recomputation_is_counted_per_chunk_and_device(self) -> None:
        made = exports["mindformers"](interleaved([2, 2, 2, 2], full(0, 4, 5)))

        assert yaml.safe_load(made.files["plan.yaml"])["recompute_config"]["recompute"] == [[1, 0], [2, 0]]
        assert made.losses == ()

    def test_patterns_reach_over_the_whole_layers_before_them(self) -> None:
        strategy = {0: ("full", "full"), 1: ("norm", "activation+multiply"), 2: ("none", "none")}
        made = exports["mindformers"](one_f_one_b([3, 1], lambda layer: strategy.get(layer, ("none", "none"))))

        config = yaml.safe_load(made.files["plan.yaml"])["recompute_config"]
        assert config["recompute"] == [1, 0]
        assert config["select_recompute"] == {
            r"attention_norm\.norm": [2, 0],
            r"feed_forward\.w1\.activation\.silu": [2, 0],
            r"feed_forward\.mul": [2, 0],
        }


class TestDeepSpeed:
    def test_the_module_has_the_plans_bounds(self) -> None:
        made = exports["deepspeed"](one_f_one_b([2, 3], full(0, 1)))

        scope: dict[str, object] = {}
        text = made.files["planned_pipeline.py"].replace("from deepspeed.pipe import", "PipelineModule = object  #")
        exec(compile(text, "planned_pipeline.py", "exec"), scope)
        assert scope["BOUNDS"] == [0, 3, 7]
        assert scope["RECOMPUTED_STAGES"] == {0}
        assert json.loads(made.files["ds_config.json"])["gradient_accumulation_steps"] == 8
        assert made.losses == ()

    def test_chunks_are_refused(self) -> None:
        with pytest.raises(ExportError, match="DeepSpeed runs its own 1f1b order"):
            exports["deepspeed"](interleaved([1, 1, 1, 1]))


class TestTorchHosts:
    def test_the_recipe_names_the_modules_of_every_stage(self) -> None:
        made = exports["torchtitan"](one_f_one_b([1, 2], full(1)))

        text = made.files["plan.py"]
        compile(text, "plan.py", "exec")
        assert "[['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]" in text
        assert "RECOMPUTED_LAYERS = {1}" in text
        assert made.files["schedule.csv"].startswith("0F0,0F1,0B0,")

    def test_a_v_is_named_by_a_schedule_that_places_stages_so(self) -> None:
        orders = [[], []]  # type: ignore[var-annotated]
        for j in range(2):
            for kind, stages in ((Kind.F, range(4)), (Kind.B, reversed(range(4)))):
                for s in stages:
                    orders[(0, 1, 1, 0)[s]].append(Op(kind, s, j))
        made = exports["torchtitan"](plan(Schedule.of("v", db.Placement.v_shape(2), 2, orders), [1, 1, 1, 1]))

        assert 'pipeline_parallel_schedule="ZBVZeroBubble"' in made.files["plan.py"]

    def test_another_placement_is_refused(self) -> None:
        orders = [["0F0", "1F0", "1B0", "0B0"], ["2F0", "2B0"]]
        with pytest.raises(ExportError, match=r"places stages in a loop, .* and this plan places them as \[0, 0, 1\]"):
            exports["torchtitan"](plan(Schedule.of("mine", db.Placement.of([0, 0, 1]), 1, orders), [1, 1, 1]))

    def test_automodel_gets_hugging_face_names_and_one_switch_for_recomputation(self) -> None:
        made = exports["automodel"](one_f_one_b([1, 1], full(0)))

        distributed = yaml.safe_load(made.files["plan.yaml"])["distributed"]
        assert distributed["pipeline"]["module_fqns_per_model_part"] == [
            ["model.embed_tokens", "model.layers.0", "model.rotary_emb"],
            ["model.layers.1", "model.norm", "lm_head", "model.rotary_emb"],
        ]
        assert distributed["activation_checkpointing"] is True
        assert made.losses == ("Automodel recomputes all layers or none: here all, which is slower than planned.",)

    @pytest.mark.parametrize(
        "family", ["falcon", "gpt_neox", "granite", "olmo2", "persimmon", "phi", "phi3", "qwen2_moe"]
    )
    def test_the_names_are_those_of_transformers_modules(self, family: str) -> None:
        transformers = pytest.importorskip("transformers", minversion="5")
        torch = pytest.importorskip("torch")
        with torch.device("meta"):
            config = type(transformers.AutoConfig.for_model(family))(num_hidden_layers=2)
            model = transformers.AutoModelForCausalLM.from_config(config)
        made = exports["automodel"](
            replace(one_f_one_b([1, 1]), model={"model_type": family, "tie_word_embeddings": False})
        )
        parts = yaml.safe_load(made.files["plan.yaml"])["distributed"]["pipeline"]["module_fqns_per_model_part"]
        named = [parameter for part in parts for name in part for parameter in model.get_submodule(name).parameters()]

        assert {id(p) for p in named} == {id(p) for p in model.parameters()}

    @pytest.mark.parametrize(
        "model", [{"tie_word_embeddings": True}, {"model_type": "cohere", "hidden_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 8}],
    )  # fmt: skip
    def test_tied_embeddings_are_refused(self, model: dict[str, object]) -> None:
        tied = replace(one_f_one_b([1, 1]), model=model)

        with pytest.raises(ExportError, match="does not train tied embeddings over a pipeline"):
            exports["torchtitan"](tied)

    def test_whole_layers_are_exported_as_layers(self) -> None:
        units = [
            PlannedUnit("embedding", None),
            *(PlannedUnit("layer", i, "full") for i in range(2)),
            PlannedUnit("head", None),
        ]
        halves = one_f_one_b([1, 1], full(0, 1))
        whole = replace(halves, partition=(tuple(units[:2]), tuple(units[2:])))

        assert exports["torchtitan"](whole) == exports["torchtitan"](halves)
        assert exports["megatron"](whole) == exports["megatron"](halves)

    def test_adapters_are_reported(self) -> None:
        lora = replace(one_f_one_b([1, 1]), options=RunOptions(lora=8))
        for target in ("torchtitan", "megatron", "torch"):
            assert exports[target](lora).losses[0].startswith("LoRA of rank 8: configure adapters of that rank")


class TestOffload:
    def test_it_is_reported_with_what_it_costs_when_the_plan_fits_without(self) -> None:
        made = exports["torch"](offloading())

        assert made.files["schedule.csv"] == "0F0,0F1,0B1,0B0\n"
        assert made.losses[:2] == (
            "Offload: all activations stay on their devices, also the 1 to be moved.",
            "With that the step is predicted to take 1.000 times as long as planned.",
        )

    def test_a_plan_that_needs_it_to_fit_is_refused(self) -> None:
        needs_it = offloading(memory_limit=1)
        needs_it.simulate()

        with pytest.raises(ExportError, match="torch cannot run this plan, whose memory depends on offload: Device 0"):
            exports["torch"](needs_it)


def test_a_stage_that_ends_within_a_layer_is_refused() -> None:
    whole = one_f_one_b([1, 1])
    first, second = whole.partition
    halved = replace(whole, partition=(first[:-1], (first[-1], *second)))

    with pytest.raises(ExportError, match="Stage 0 holds only the attention half of layer 0"):
        exports["megatron"](halved)


def test_a_plan_from_stage_costs_is_refused_where_layers_are_needed() -> None:
    abstract = Plan(
        **{**vars(one_f_one_b([1, 1])), "partition": ((PlannedUnit("stage", 0),), (PlannedUnit("stage", 1),))}
    )

    with pytest.raises(ExportError, match="names no model layers"):
        exports["megatron"](abstract)
    assert list(exports["torch"](abstract).files) == ["schedule.csv"]
