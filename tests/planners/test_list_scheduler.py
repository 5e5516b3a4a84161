"""The list that `joint`'s list scheduler writes takes the time that it says, whatever moves to the host."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs import Strategy, Unit, Units
from debubble.costs.unit import HostStates
from debubble.ir import Placement
from debubble.planners.joint.annealing_kernel import QUARTERS, UNLIMITED
from debubble.planners.joint.levers import Levers, Point, policy_choices
from debubble.planners.joint.list_scheduling.scheduler import schedule
from debubble.planners.problem import ModelUnits, Problem

UNITS = 24
SCALES = (0.25, 0.5, 1.0)


@st.composite
def models(draw: st.DrawFn, devices: int, *, whole: bool) -> Units:
    """Models with links to the host, for times and sizes that are whole numbers or any."""
    numbers = st.integers(1, 6).map(float) if whole else st.floats(0.5, 6)
    activation, stepped = draw(numbers), draw(st.booleans())
    host = HostStates(static=1, gradients=draw(numbers), parameters=draw(numbers), step=draw(numbers))
    again = draw(numbers)

    def unit(forward: float) -> Unit:
        return Unit(
            type="layer", layer=None, forward=forward, backward_input=draw(numbers), backward_weight=draw(numbers),
            static=3, activation_after_input=draw(st.sampled_from([0.5, 1.0])) * activation, workspace=1,
            strategies={
                "none": Strategy(8 * activation),
                "some": Strategy(4 * activation, again / 2),
                "full": Strategy(activation, again),
            },
            on_host=host if stepped else None,
        )  # fmt: skip

    size = draw(st.sampled_from([1, 2, 4, devices]))
    groups = [tuple(range(first, min(first + size, devices))) for first in range(0, devices, size)]
    alike = draw(st.booleans())
    units = [unit(draw(numbers))] * UNITS if alike else [unit(draw(numbers)) for _ in range(UNITS)]
    m = draw(st.integers(1, 8))
    return Units(
        units=tuple(units),
        communication=draw(st.sampled_from([0.0, 1.0]) if whole else st.floats(0, 1)),
        offload_bandwidth=draw(st.sampled_from([1.0, 4.0, 16.0]) if whole else st.floats(1, 16)),
        host_link=draw(st.sampled_from(["full-duplex", "half-duplex"])),
        link_groups=() if size == 1 else tuple(groups),
        memory_limit=draw(st.none() | st.integers(100, 1500).map(lambda limit: (float(limit),))),
        micro_batch_scale=(1.0,) * m if draw(st.booleans()) else tuple(draw(st.sampled_from(SCALES)) for _ in range(m)),
    )


@st.composite
def points(draw: st.DrawFn, stages: int, levels: int, *, hostable: bool) -> Point:
    """Any choices for stages of a few units each."""

    def each(choices: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(choices, min_size=stages, max_size=stages)))

    return Point(
        counts=tuple(UNITS // stages + (s < UNITS % stages) for s in range(stages)),
        levels=each(st.integers(0, levels - 1)),
        shares=each(st.integers(0, QUARTERS)),
        most=each(st.just(UNLIMITED) | st.integers(1, 4)),
        hosted=tuple(n > 0 for n in each(st.integers(0, 1 if hostable else 0))),
        policy=tuple(
            draw(st.sampled_from([*choices])) for choices in policy_choices(stages, first=range(4) if hostable else ())
        ),
    )


@pytest.mark.parametrize("whole", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_list_takes_the_time_that_the_scheduler_says_and_fits(whole: bool, data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 5))
    make = data.draw(st.sampled_from([Placement.looped, Placement.v_shape]))
    placement = make(devices, data.draw(st.integers(1, min(6, UNITS // devices))))
    units = data.draw(models(devices, whole=whole))
    assert units.micro_batch_scale is not None
    problem = Problem(workload=ModelUnits(units), devices=devices, micro_batches=len(units.micro_batch_scale))
    levers = Levers(problem, units, placement)
    point = data.draw(points(placement.stages, levers.levels, hostable=units.hostable))
    table, lacking = levers.table(point)
    made = schedule(table, levers.scales, np.array(point.policy), np.array(point.most))
    assume(not lacking and not made.missing)
    solution = levers.solution(point)
    timeline = db.simulate(solution.schedule, solution.costs)
    assert made.makespan == pytest.approx(float(timeline.makespan), rel=1e-9)
    assert units.memory_limit is None or max(timeline.peak_memory) <= units.memory_limit[0] * (1 + 1e-12)
