"""The planners of offload: verified answers, in the order that the paper claims, with honest bounds."""

from __future__ import annotations

import pytest

from debubble.costs.units import Strategy, Unit, Units
from debubble.ir import InfeasibleError, StageCosts
from debubble.planners import Problem, planners


def costs(p: int, to: float | None, limit: int) -> StageCosts:
    return StageCosts.of(
        stages=p, forward=10, backward_input=10, backward_weight=10, activation=2, activation_after_input=1,
        communication=1, offload=to, memory_limit=2 * limit,
    )  # fmt: skip


def units() -> Units:
    inner = Unit(
        type="dense", layer=None, forward=2, backward_input=2, backward_weight=2, static=1,
        strategies={"none": Strategy(4), "full": Strategy(1, 2)},
    )  # fmt: skip
    ends = Unit(
        type="end", layer=None, forward=1, backward_input=1, backward_weight=1, static=1,
        strategies={"none": Strategy(1)},
    )  # fmt: skip
    return Units(units=(ends, *[inner] * 8, ends), communication=0.1, offload_bandwidth=2, memory_limit=(24,))


@pytest.mark.parametrize(("p", "m", "to", "limit"), [(4, 8, 10, 3), (4, 8, 10, 4)])
def test_optpipe_is_proven_optimal_and_the_rules_follow(p: int, m: int, to: int, limit: int) -> None:
    problem = Problem(devices=p, micro_batches=m, costs=costs(p, to, limit), effort=20)
    results = {name: planners[name](problem) for name in ("optpipe", "adaoffload", "pipeoffload")}
    assert results["optpipe"].gap == 0
    assert results["optpipe"].makespan == 273
    assert 273 <= results["adaoffload"].makespan <= results["pipeoffload"].makespan
    for result in results.values():
        assert all(peak <= 2 * limit for peak in result.timeline.peak_memory)


def test_units_are_partitioned_and_ordered_within_memory() -> None:
    problem = Problem(devices=2, micro_batches=4, units=units(), effort=2)
    for name in ("optpipe", "adaoffload", "pipeoffload"):
        result = planners[name](problem)
        assert result.solution.partition is not None
        assert sum(map(len, result.solution.partition)) == 10
        assert all(peak <= 24 for peak in result.timeline.peak_memory)


def test_optpipe_searches_several_chunks() -> None:
    problem = Problem(devices=2, micro_batches=4, costs=costs(4, 5, 3), chunks=2, effort=2)
    result = planners["optpipe"](problem)
    assert result.solution.schedule.placement.device_of == (0, 1, 0, 1)
    assert result.lower_bound <= result.makespan


def test_the_rules_need_a_link_to_the_host() -> None:
    problem = Problem(devices=2, micro_batches=4, costs=costs(2, None, 2))
    for name in ("adaoffload", "pipeoffload"):
        with pytest.raises(InfeasibleError, match="no link"):
            planners[name](problem)


def test_what_fits_nowhere_is_infeasible() -> None:
    with pytest.raises(InfeasibleError):
        planners["optpipe"](Problem(devices=2, micro_batches=4, costs=costs(2, 5, 0), effort=2))
