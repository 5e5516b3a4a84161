"""Ten models on five clusters, planned for every target: every export accepts its plan."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import product

import pytest
from benchmark import DOCS, between

import debubble as db
import targets as benchmark
from debubble.costs.frameworks import TARGET
from debubble.exports import exports
from debubble.ir import DebubbleError
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.targets import targets
from tests.support.target_steps import step_in

MODELS = (
    "llama3-8b", "llama2-13b", "llama3-70b", "llama3.2-1b", "qwen3-8b", "qwen2.5-32b", "mistral-7b", "mixtral-8x7b",
    "gpt3-13b", "glm-4.5-air",
)  # fmt: skip
CLUSTERS = ("4xL40S", "8xA100-40GB", "8xH100-80GB", "16xA100-80GB", "64xH100-80GB")


def test_the_pages_are_generated_from_the_results() -> None:
    rows = benchmark.BENCHMARK.rows()

    for place, make_page in benchmark.BENCHMARK.pages.items():
        page, _, mark = place.partition("#")
        assert between(DOCS / page, mark)[1] == make_page(rows), "python benchmarks/targets.py --docs"


def test_every_export_is_accepted_and_at_most_5_percent_slower() -> None:
    rows = benchmark.BENCHMARK.rows()

    assert [(row["model"], row["cluster"]) for row in rows] == [*product(MODELS, CLUSTERS)]
    cells = [(row, target) for row in rows for target in targets if row["targets"][target]["step"] is not None]
    assert {row["targets"][target]["export"] for row, target in cells} == {"taken"}
    assert max(benchmark.slowdown(row, target) or math.inf for row, target in cells) <= MAX_RATIO


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_target_accepts_its_plan(model: str, cluster: str) -> None:
    def planned(target: str) -> Plan | None:
        try:
            return searched(model, cluster, target)
        except DebubbleError:
            return None

    for name in targets:
        plan = planned(name)
        if plan is None:
            continue
        assert name in plan_runs_in(plan)
        if name in exports:
            assert not [loss for loss in exports[name](plan).losses if "times as long" in loss]


GRID = [("llama3-8b", "8xA100-40GB"), ("llama2-13b", "16xA100-80GB"), ("mixtral-8x7b", "64xH100-80GB")]
MAX_RATIO = 1.05


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster"), GRID)
def test_plans_of_targets_are_close_to_their_fastest_plan(model: str, cluster: str) -> None:
    """The fastest is taken of all plans that the target runs unchanged, with the memory that the target needs."""
    plans: dict[str | None, Plan] = {}
    for target in (None, *targets):
        for planner in ("adapipe", "portfolio"):
            with suppress(DebubbleError):
                plan = searched(model, cluster, target, planner=planner, effort=3)
                if target not in plans or seconds(plan) < seconds(plans[target]):
                    plans[target] = plan

    steps = {
        target: [step for plan in plans.values() if target in plan_runs_in(plan) and (step := step_in(plan, target))]
        for target in targets
        if target in plans
    }
    ratios = {target: seconds(plans[target]) / min(times) for target, times in steps.items()}

    assert {target: ratio for target, ratio in ratios.items() if ratio > MAX_RATIO} == {}


def seconds(plan: Plan) -> float:
    return seconds_per_step(plan)


def searched(model: str, cluster: str, target: str | None, *, planner: str = "adapipe", effort: float = 0.3) -> Plan:
    """A plan of 64 sequences on pipelines of eight devices, with ZeRO-1 over data-parallel replicas."""
    devices = db.Cluster.parse(cluster)
    pipeline = min(8, devices.count)
    data = devices.count // pipeline
    return db.plan(
        db.models[model], devices, pipeline=pipeline, data=data, zero=int(data > 1), micro_batches=64 // data,
        sequence_length=2048, effort=effort, planner=planner, target=target, framework=TARGET,
    )  # fmt: skip
