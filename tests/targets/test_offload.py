"""Offload by module: the bytes and order of transfers, and plans for Megatron-LM that use it."""

from __future__ import annotations

from typing import Any

import pytest

import debubble as db
from debubble.costs import Cluster
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.exports import exports
from debubble.frameworks.megatron.export import OFFLOAD_REMARK
from debubble.ir import RunOptions
from debubble.models import Model
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.planners.model_problem import half_layers, problem_of
from debubble.planners.partitioning.local_search import PricedSchedule, improve
from debubble.planners.plan_step import tail_of
from debubble.planners.registry import planners, verify
from debubble.search.effort import Effort
from debubble.targets.offload import ModuleOffload
from tests.exports.hand_plans import LLAMA, MIXTRAL


def units_of(config: dict[str, Any]) -> Units:
    return half_layers(Model.from_hf(config), Cluster.parse("2xA100-80GB"), RunOptions(), pipeline=2, target="megatron")


TWO_STAGES = Partition.cut(units_of(LLAMA), [5, 5])
TOKENS, HIDDEN, BYTES = 4096, 1024, 2


def test_transfers_follow_forwards_and_precede_backwards() -> None:
    plain = db.schedules["1f1b"](devices=2, micro_batches=2)

    scheduled = ModuleOffload(("core_attn",)).schedule(plain, units_of(LLAMA), TWO_STAGES)

    first = [op.name for op in scheduled.orders[0]]
    assert first == ["0F0", "0O0", "0F1", "0O1", "0L0", "0B0", "0L1", "0B1"]
    # A stage whose backward follows its forward keeps everything.
    assert scheduled.orders[1] == plain.orders[1]
    assert set(scheduled.offload_fraction) == {0}


CORE, RESULT = 3 * TOKENS * HIDDEN * BYTES, TOKENS * (HIDDEN * BYTES + 8 * 4)
"""Bytes of queries, keys and values, and of the output of attention with the statistics of 8 heads."""


@pytest.mark.parametrize(
    ("modules", "share", "moved"),
    [
        (("core_attn",), 1.0, 2 * CORE),
        (("core_attn", "attn_proj"), 1.0, 2 * (CORE + RESULT)),
        (("core_attn", "attn_proj"), 0.25, CORE),
        (("qkv_linear",), 1.0, 3 * TOKENS * HIDDEN * BYTES),
        (("expert_fc1", "moe_act"), 1.0, 0),
    ],
    ids=["core", "core and projection", "a fraction", "all but the input of the stage", "no experts"],
)
def test_two_layers_offload_the_tensors_of_their_modules(modules: tuple[str, ...], share: float, moved: float) -> None:
    assert ModuleOffload(modules, share).moved_bytes(units_of(LLAMA), TWO_STAGES)[0] == moved


def test_expert_modules_are_offloaded() -> None:
    assert all(ModuleOffload(("expert_fc1", "moe_act")).moved_bytes(units_of(MIXTRAL), TWO_STAGES))


@pytest.mark.parametrize(
    ("modules", "recomputed", "combines"),
    [
        (("core_attn",), {"norm"}, True),
        (("core_attn",), {"core"}, False),
        (("moe_act",), {"mlp"}, False),
        (("moe_act",), {"core"}, True),
        (("qkv_linear",), {"full"}, False),
    ],
)
def test_recomputed_modules_are_not_offloaded(modules: tuple[str, ...], recomputed: set[str], combines: bool) -> None:
    assert ModuleOffload(modules).combines_with(recomputed) == combines


MIXTRAL_RUN: dict[str, Any] = {"data": 4, "zero": 1, "expert": 4, "sequence_length": 8192}


@pytest.mark.slow
def test_a_verified_plan_keeps_its_offload() -> None:
    problem = problem_of(
        db.models["mixtral-8x7b"], Cluster.parse("16xH100-80GB"),
        RunOptions(**MIXTRAL_RUN), micro_batches=8, effort=0.3, target="megatron",
    )  # fmt: skip
    result = planners["portfolio"](problem)

    verified = verify("auto", problem, result.solution, 0.0)
    start = PricedSchedule(
        float(result.time), result.solution.schedule, result.solution.costs, result.solution.partition
    )

    assert result.solution.schedule.offloaded
    assert improve(problem, start, effort=Effort(1.0)) is start
    assert verified.solution.schedule == result.solution.schedule


def test_a_plan_for_megatron_offloads_where_that_is_faster() -> None:
    plan = db.plan(
        "mixtral-8x7b", "16xH100-80GB", micro_batches=8, planner="portfolio", effort=0.3, target="megatron",
        **MIXTRAL_RUN,
    )  # fmt: skip

    assert plan.schedule.offloaded
    assert plan.simulate().makespan >= float(plan.lower_bound) - tail_of(plan)
    assert "megatron" in plan_runs_in(plan)
    written = exports["megatron"](plan)
    assert written.losses == (OFFLOAD_REMARK,)
    assert "--fine-grained-activation-offloading" in written.files["megatron-arguments.sh"]
    assert "export NVTE_CPU_OFFLOAD_V1=1" in written.files["megatron-arguments.sh"]
