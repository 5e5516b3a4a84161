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
"""Work of six layers of an attention and an MLP, and of a head."""


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


def equal_counts_bound(problem: Problem) -> float:
    return bound_of_equal_counts(problem, known_bound=proven_bound(problem).time)


def test_free_assignment_beats_the_bound_of_equal_counts() -> None:
    problem = problem_of()
    result = planners["joint"](problem)
    assert len(set(map(len, result.solution.schedule.placement.stages_of))) > 1
    assert proven_bound(problem).time <= result.time < equal_counts_bound(problem)
    assert result.lower_bound <= result.time


@pytest.mark.parametrize(
    ("works", "devices", "micro_batches"), [(WORKS, 5, 2), ((1, 9, 2, 8, 3, 7, 4, 6, 30), 3, 9), ((4, 4, 4), 3, 1)]
)
def test_every_unit_is_assigned_once_and_no_device_is_empty(
    works: tuple[int, ...], devices: int, micro_batches: int
) -> None:
    problem = problem_of(works, devices=devices, micro_batches=micro_batches)
    solution = assign(problem, problem.units)
    assert solution.partition is not None
    assert Counter(index for stage in solution.partition for index, _ in stage) == Counter(range(len(works)))
    assert solution.schedule.placement.devices == devices
    simulate(solution.schedule, solution.costs)


def test_the_same_seed_gives_the_same_assignment() -> None:
    problem = problem_of()
    assert assign(problem, problem.units) == assign(problem, problem.units)


def test_states_that_fit_no_assignment_are_refused() -> None:
    problem = problem_of()
    tight = replace(problem.units, memory_limit=(4,))
    with pytest.raises(InfeasibleError, match="without recomputation"):
        assign(replace(problem, workload=ModelUnits(tight)), tight)


@pytest.mark.slow
def test_joint_assigns_a_job_too_large_for_its_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_planner, "MAX_PAIRS", 100)
    problem = problem_of()
    assert planners["joint"](problem).solution == assign(problem, problem.units)
    with pytest.raises(InfeasibleError, match="too many for its chains"):
        planners["joint"](replace(problem, chunks=3))
