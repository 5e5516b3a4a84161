from collections import Counter
from dataclasses import replace

import pytest

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import InfeasibleError
from debubble.planners import planners
from debubble.planners.bounds.proven import bound_of_equal_counts, proven_bound
from debubble.planners.joint import planner as joint_planner
from debubble.planners.joint.assignment import assign
from debubble.planners.problem import ModelUnits, Problem
from debubble.simulator import simulate

WORKS = (*(5, 7) * 6, 4)
"""Six layers of an attention and an MLP, and a head."""


def problem_of(works: tuple[int, ...] = WORKS, *, devices: int = 4, micro_batches: int = 60) -> Problem:
    units = tuple(
        Unit(
            type="layer", layer=None, forward=work, backward_input=work, backward_weight=work, static=1,
            strategies={"none": Strategy(1)},
        )
        for work in works
    )  # fmt: skip
    model = Units(units=units, memory_limit=(1000,))
    return Problem(workload=ModelUnits(model), devices=devices, micro_batches=micro_batches, effort=0.5)


def least_of_equal_counts(problem: Problem) -> float:
    return bound_of_equal_counts(problem, known_bound=proven_bound(problem).time)


def test_units_dealt_freely_take_less_than_any_equal_counts_can() -> None:
    problem = problem_of()
    result = planners["joint"](problem)
    assert len(set(map(len, result.solution.schedule.placement.stages_of))) > 1
    assert proven_bound(problem).time <= result.time < least_of_equal_counts(problem)
    assert result.lower_bound <= result.time


@pytest.mark.parametrize(
    ("works", "devices", "micro_batches"), [(WORKS, 5, 2), ((1, 9, 2, 8, 3, 7, 4, 6, 30), 3, 9), ((4, 4, 4), 3, 1)]
)
def test_every_unit_is_dealt_once_and_every_device_holds_some(
    works: tuple[int, ...], devices: int, micro_batches: int
) -> None:
    problem = problem_of(works, devices=devices, micro_batches=micro_batches)
    found = assign(problem, problem.units)
    assert found.partition is not None
    assert Counter(index for stage in found.partition for index, _ in stage) == Counter(range(len(works)))
    assert found.schedule.placement.devices == devices
    simulate(found.schedule, found.costs)


def test_a_deal_is_the_same_with_the_same_seed() -> None:
    problem = problem_of()
    assert assign(problem, problem.units) == assign(problem, problem.units)


def test_states_that_fit_no_deal_are_refused() -> None:
    problem = problem_of()
    tight = replace(problem.units, memory_limit=(4,))
    with pytest.raises(InfeasibleError, match="without recomputation"):
        assign(replace(problem, workload=ModelUnits(tight)), tight)


@pytest.mark.slow
def test_joint_deals_a_job_that_is_too_large_for_its_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_planner, "MAX_PAIRS", 100)
    problem = problem_of()
    assert planners["joint"](problem).solution == assign(problem, problem.units)
    with pytest.raises(InfeasibleError, match="too many for its chains"):
        planners["joint"](replace(problem, chunks=3))
