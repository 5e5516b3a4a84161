from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from rich.console import Console

import debubble as db
from debubble.ir import Trace
from debubble.plans import Plan
from debubble.views import Scene
from debubble.views.comparison import Comparison, as_dict, compare, pair, render
from debubble.views.scene_table import side_by_side
from tests.views.scenes import small_plan, surrounded, trace_of


def test_ratios_are_of_measured_to_planned_times() -> None:
    plan = small_plan()

    comparison = compare(plan, trace_of(plan))

    assert comparison.makespan == pair(19, 19)
    assert comparison.kinds == {"F": pair(1, 1), "B": pair(2, 2), "SEND_F": pair(1, 1), "SEND_B": pair(1, 1)}
    assert comparison.drift == "The pipeline took 1.00 times as long as predicted."
    entries = as_dict(compare(plan, trace_of(plan, slower=2)))
    assert entries["makespan"] == {"predicted": 19, "measured": 38, "ratio": 2}
    assert entries["kinds"]["B"]["ratio"] == 2
    assert entries["bubble_fraction"]["ratio"] == pytest.approx(1)


def three_steps(plan: Plan) -> Trace:
    """Step 0 has the median length and half the memory of the others; step 1 has the most memory."""
    first, second, third = (trace_of(plan, slower=slower).typical for slower in (2, 1, 3))
    half = tuple(sample._replace(bytes=sample.bytes / 2) for sample in first.memory)
    double = tuple(sample._replace(bytes=sample.bytes * 2) for sample in second.memory)
    steps = (replace(first, step=0, memory=half), replace(second, step=1, memory=double), replace(third, step=2))
    return Trace(devices=2, steps=steps)


def test_warm_up_is_excluded_and_the_step_is_named() -> None:
    plan = small_plan()

    comparison = compare(plan, three_steps(plan))

    assert comparison.makespan == pair(19, 57)
    first = "Step 2 (counted from 0), the typical one of steps 1 to 2: 57 s, predicted 19 s;"
    assert printed(comparison).startswith(first)
    assert (as_dict(comparison)["step"], as_dict(comparison)["steps"]) == (2, (1, 2))
    assert comparison.peak_memory == (pair(3, 12), pair(2, 8))


def test_drift_names_the_largest_deviation() -> None:
    """1B0 takes 4 instead of 2, and all later operations wait for it."""
    plan = small_plan()
    step = trace_of(plan).typical
    late = next(e for e in step.events if e.name == "1B0").end
    events = tuple(
        e._replace(start=e.start + 2 * (e.start >= late), end=e.end + 2 * (e.end >= late)) for e in step.events
    )

    comparison = compare(plan, Trace(devices=2, steps=(replace(step, events=events),)))

    assert as_dict(comparison)["worst"][0] == {"operation": "1B0", "predicted": 2, "measured": 4, "ratio": 2}
    assert comparison.drift == (
        "The pipeline took 1.11 times as long as predicted; most of that is backward on stage 1, at 1.25 times its"
        " prediction."
    )


def test_longer_waits_in_a_shorter_step_are_reported() -> None:
    plan = small_plan(schedule="interleaved", chunks=2, communication=0, memory_limit=None)
    faster = dict.fromkeys(("forward", "backward_input", "backward_weight"), 0.1)

    drift = compare(plan, trace_of(replace(plan, costs=plan.costs.replace(**faster, communication=0.8)))).drift

    assert drift == (
        "The pipeline took 0.38 times as long as predicted; its operations took 0.10 times as long as predicted, but"
        " devices waited longer."
    )


@pytest.mark.parametrize(
    ("times", "ending"),
    [
        ((1, 2.2, 1.1), " Device 1 computed 2.20 times as long as predicted, the others 1.05 times."),
        ((1, 0.5, 1), " Device 1 computed 0.50 times as long as predicted, the others 1.00 times."),
        ((1, 2), " Device 1 computed 2.00 times as long as predicted, the other 1.00 times."),
        ((2, 2.2, 2.1), ""),
        ((1, 2, 3), ""),
    ],
)
def test_one_deviating_device_is_named(times: tuple[float, ...], ending: str) -> None:
    plan = small_plan(devices=len(times))
    slower = plan.costs.replace(**dict.fromkeys(("forward", "backward_input", "backward_weight"), times))

    drift = compare(plan, trace_of(replace(plan, costs=slower))).drift

    assert drift.endswith(ending)
    assert ("Device" in drift) == bool(ending)


def test_devices_that_share_cores_are_compared_with_these_cores() -> None:
    """F takes 1 and B 2: on one core the work of the devices is serialized."""
    plan = small_plan()
    trace = replace(trace_of(plan), cores=1)

    predicted, measured = Scene.pair(plan, trace)

    assert predicted.title.endswith("2 devices on 1 core")
    assert measured.timeline.makespan == Scene.predicted(plan).timeline.makespan == 19
    assert compare(plan, trace).makespan.predicted == predicted.timeline.makespan == 25
    enough = compare(plan, replace(trace, cores=16))
    assert (enough.makespan, enough.planned_step) == (compare(plan, trace_of(plan)).makespan, 19)
    assert "These are times of the pipeline" not in printed(enough)
    words = " ".join(printed(compare(plan, trace)).split())
    assert "predicted 25 s for 2 devices on 1 core" in words
    assert (
        "the plan's whole step, gradients and optimizer included, is 19 s, each device with a core of its own." in words
    )


def printed(comparison: Comparison) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(comparison))
    return capture.get()


def test_phases_around_programs_explain_the_full_step() -> None:
    plan = small_plan()

    comparison = compare(plan, surrounded(plan))

    assert comparison.makespan.measured == 19
    assert comparison.around == {"reads data": 2, "updates": 2.5}
    assert comparison.seconds == 3 + 19 + 5
    assert as_dict(comparison)["around"] == comparison.around


def test_two_simulated_schedules_are_compared_as_a_and_b() -> None:
    costs = db.StageCosts.of(stages=12).replace(forward=[Fraction(1, 3)] * 12)
    scenes = []
    for name in ("gpipe", "zb-v"):
        schedule = db.schedules[name](devices=6 if name == "zb-v" else 12, micro_batches=12, costs=costs)
        scenes.append(Scene(db.simulate(schedule, costs), title=name))
    table = side_by_side(scenes)
    assert table is not None
    assert (table.columns[1:3], table.caption) == (("A", "B"), "A is gpipe; B is zb-v.")
