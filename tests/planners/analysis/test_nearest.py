from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

import debubble as db
from debubble.imports.calibration import calibrate
from debubble.imports.logs import MeasuredFigures
from debubble.planners.analysis.nearest_plans import plan_runs_in, quick_nearest
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.fixed_plan import fixed_plan
from debubble.planners.model_problem import problem_of
from debubble.planners.plan_step import seconds_per_step
from debubble.targets import targets
from debubble.views import Scene
from debubble.views.plan_table import render


@pytest.fixture(scope="module")
def planned() -> db.Plan:
    return db.plan(db.models["llama3-8b"], db.Cluster.parse("4xL40S"), micro_batches=8, planner="adapipe")


def test_targets_that_do_not_run_the_plan_get_a_quick_plan(planned: db.Plan) -> None:
    """The kernels of Automodel and DeepSpeed need more memory than there is."""
    ratios = quick_nearest(planned)
    assert set(ratios) == {*targets} - {*plan_runs_in(planned), "mindformers", "automodel", "deepspeed", "torch"}
    described = planned.model_on_cluster
    assert described is not None
    megatron = problem_of(
        *described, replace(planned.options, framework="megatron-lm"), micro_batches=8, pipeline=4,
        target="megatron",
    )  # fmt: skip
    assert ratios["megatron"] * seconds_per_step(planned) == pytest.approx(quick_step(megatron)[0])


def test_measured_runs_do_not_change_the_ratio_to_a_framework(planned: db.Plan) -> None:
    step = seconds_per_step(planned)
    measured = calibrate(planned, MeasuredFigures(step=1.5 * step))
    again = db.plan(db.models["llama3-8b"], measured.cluster, micro_batches=8, planner="adapipe")

    assert seconds_per_step(again) > 1.2 * step
    assert quick_nearest(again)["megatron"] == pytest.approx(quick_nearest(planned)["megatron"], rel=0.02)


def test_abstract_costs_run_in_no_framework() -> None:
    costs = db.StageCosts.of(stages=2)
    plan = db.Plan(
        planner="hand", schedule=db.schedules["1f1b"](devices=2, micro_batches=2), costs=costs, lower_bound=0,
        partition=(),
    )  # fmt: skip
    assert quick_nearest(plan) == {}


@pytest.mark.parametrize(("ratios", "said"), [
    ({"megatron": 1.25, "torch": 1.001}, "torch as fast, megatron ≤25% slower"),
    ({"torchtitan": 0.8}, "torchtitan ≥20% faster"),
])  # fmt: skip
def test_the_plan_table_says_what_other_targets_cost(ratios: dict[str, float], said: str, planned: db.Plan) -> None:
    console = Console(width=200, file=StringIO(), record=True)
    compared = replace(planned, other_targets=ratios)
    console.print(render(compared, Scene.predicted(compared)))
    words = " ".join(console.export_text().split())
    assert f"with these degrees: {said}" in words


def test_host_steps_of_a_shared_embedding_are_not_supported() -> None:
    plans = [
        fixed_plan(
            db.models[name], db.Cluster.parse("2xA100-80GB"), schedule="interleaved", micro_batches=4, host_chunks=1
        )
        for name in ("llama3.2-1b", "llama2-7b")
    ]

    assert ["debubble" in plan_runs_in(plan) for plan in plans] == [False, True]
