"""Megatron-Bridge and Primus have Megatron-LM's settings in other forms."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

import debubble as db
from debubble.exports import exports
from debubble.frameworks.megatron.export import OFFLOAD_REMARK
from debubble.plans import Plan
from debubble.targets.offload import ModuleOffload
from tests.exports.hand_plans import MIXTRAL, full, interleaved, moving, priced


def changed(plan: Plan) -> Any:
    """Configuration of a Bridge recipe after the written function."""
    scope: dict[str, Any] = {}
    exec(exports["megatron"](plan).files["megatron_bridge.py"], scope)
    parts = {name: SimpleNamespace() for name in ("model", "train", "ddp", "optimizer", "checkpoint", "comm_overlap")}
    cfg = SimpleNamespace(**parts, dataset=SimpleNamespace(sequence_length=1), mixed_precision=None)
    return scope["apply"](cfg)


def test_bridge_recipe_gets_all_parts_of_the_plan() -> None:
    cfg = changed(priced(full(0, 2), data=2, tensor=2, zero=1))

    assert cfg.model.pipeline_model_parallel_layout == "Et*2|t*2L"
    assert cfg.model.virtual_pipeline_model_parallel_size is None
    assert (cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel) == (2, True)
    assert (cfg.model.recompute_granularity, cfg.model.recompute_method, cfg.model.recompute_num_layers) == (
        "full",
        "block",
        1,
    )
    assert (cfg.train.micro_batch_size, cfg.train.global_batch_size) == (1, 16)
    assert cfg.ddp.use_distributed_optimizer
    assert cfg.optimizer.optimizer == "adam"
    assert (cfg.dataset.sequence_length, cfg.mixed_precision) == (4096, "bf16_mixed")
    assert cfg.model.num_layers_in_first_pipeline_stage is None
    assert cfg.model.account_for_loss_in_pipeline_split is False
    assert changed(priced()).model.recompute_modules is None


def test_experts_are_one_grouped_product_as_priced() -> None:
    offloading = moving(priced(config=MIXTRAL), ModuleOffload(("expert_fc1", "moe_act")))
    script = exports["megatron"](offloading).files["megatron-arguments.sh"]
    assert "    --moe-grouped-gemm\n" in script
    assert "    --offload-modules expert_fc1 moe_act\n" in script
    primus = yaml.safe_load(exports["primus"](priced(config=MIXTRAL)).files["plan.yaml"])
    assert primus["modules"]["pre_trainer"]["overrides"]["moe_grouped_gemm"] is True
    assert "--moe-grouped-gemm" not in exports["megatron"](priced()).files["megatron-arguments.sh"]


@pytest.mark.parametrize(
    ("options", "precision", "wide"),
    [
        ({"gradient_dtype": "bf16"}, "bf16_mixed", False),
        ({"framework": "megatron-bridge"}, "bf16_mixed", False),
        ({"dtype": "fp16", "gradient_dtype": "fp32"}, "fp16_mixed", True),
    ],
)
def test_a_bridge_recipe_sums_gradients_in_the_planned_dtype(
    options: dict[str, Any], precision: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bridge overwrites other sections with the precision's setting."""
    names = ("megatron", "megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.mixed_precision")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].get_mixed_precision_config = (  # type: ignore[attr-defined]
        lambda name: SimpleNamespace(name=name, grad_reduce_in_fp32=not wide)
    )

    cfg = changed(priced(data=2, zero=1, **options))

    assert vars(cfg.mixed_precision) == {"name": precision, "grad_reduce_in_fp32": wide}
    assert not {"grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"} & vars(cfg.model).keys()


def test_modules_and_virtual_stages_reach_a_bridge_recipe() -> None:
    sparse = changed(priced(lambda layer: ("none", "norm+mlp"), config=MIXTRAL))

    assert sparse.model.recompute_modules == ["layernorm", "moe"]
    assert sparse.model.moe_grouped_gemm is True
    assert changed(interleaved([1, 1, 1, 1])).model.virtual_pipeline_model_parallel_size == 2


def test_offload_reaches_a_bridge_recipe_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "0")
    plan = moving(priced(), ModuleOffload(("core_attn", "attn_proj")))
    cfg = changed(plan)

    assert OFFLOAD_REMARK in exports["megatron"](plan).losses
    assert cfg.model.fine_grained_activation_offloading
    assert cfg.model.offload_modules == ["core_attn", "attn_proj"]
    assert cfg.model.min_offloaded_tensor_size == 0
    assert os.environ["NVTE_CPU_OFFLOAD_V1"] == "1"
    assert changed(priced()).model.fine_grained_activation_offloading is False


def test_arguments_that_turn_something_off_are_settings_of_it() -> None:
    plan = priced(data=2, zero=3)
    assert changed(plan).model.gradient_accumulation_fusion is False
    assert overrides(plan)["gradient_accumulation_fusion"] is False


def test_primus_offloads_like_megatron_and_asks_for_a_variable() -> None:
    plan = moving(priced(), ModuleOffload(("core_attn",), 0.5))
    made = exports["primus"](plan)

    assert overrides(plan)["offload_modules"] == ["core_attn"]
    assert overrides(plan)["activation_offload_fraction"] == 0.5
    assert made.losses == ("Set NVTE_CPU_OFFLOAD_V1=1 in the environment of the experiment.",)


def overrides(plan: Plan) -> dict[str, Any]:
    config = yaml.safe_load(exports["primus"](plan).files["plan.yaml"])
    entries: dict[str, Any] = config["modules"]["pre_trainer"]["overrides"]
    return entries


def test_primus_recomputes_the_very_layers_of_the_plan() -> None:
    made = exports["primus"](priced(full(0, 3)))

    assert made.losses == ()
    written = overrides(priced(full(0, 3)))
    assert written["recompute_layer_ids"] == [0, 3]
    assert (written["recompute_granularity"], written["recompute_method"]) == ("full", None)
    assert written["pipeline_model_parallel_layout"] == "Et*2|t*2L"


def test_primus_runs_zb_h1_with_its_pipeline() -> None:
    written = overrides(priced(schedule=db.schedules["zb-h1"](devices=2, micro_batches=8)))

    assert (written["patch_primus_pipeline"], written["pp_algorithm"]) == (True, "zero-bubble")
    assert "patch_primus_pipeline" not in overrides(priced())


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"framework": "target,gradient_overlap=true"}, {"--overlap-grad-reduce"}),
        (
            {"framework": "target,gradient_overlap=true", "data": 2, "zero": 1},
            {"--overlap-grad-reduce", "--overlap-param-gather"},
        ),
        (
            {"framework": "target,gradient_overlap=true,gather_overlap=false", "data": 2, "zero": 1},
            {"--overlap-grad-reduce"},
        ),
        ({"framework": "target,tensor_overlap=true", "tensor": 2}, {"--tp-comm-overlap"}),
        ({"framework": "target,tensor_overlap=true"}, set()),
        (
            {"framework": "target,dispatches_once=true", "config": MIXTRAL, "data": 2, "expert": 2},
            {"--moe-enable-deepep"},
        ),
    ],
)
def test_priced_overlaps_become_megatron_arguments(options: dict[str, Any], flags: set[str]) -> None:
    made = exports["megatron"](priced(**options))
    named = {"--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap", "--moe-enable-deepep"}
    words = set(made.files["megatron-arguments.sh"].partition("DEBUBBLE_ARGS=(")[2].split())

    assert words & named == flags
    assert made.losses == ()


def test_script_lists_user_arguments_to_remove() -> None:
    header, _, arguments = exports["megatron"](priced(full(0, 2))).files["megatron-arguments.sh"].partition("=(")
    removed = {word for word in header.split() if word.startswith("--")}

    assert {"--num-layers-per-virtual-pipeline-stage", "--recompute-modules"} <= removed
    assert removed.isdisjoint(arguments.split())
