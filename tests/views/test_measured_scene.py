from __future__ import annotations

from dataclasses import replace

import pytest

from debubble.ir import InputError, Kind, Lane, Op, Trace, TraceEvent, TraceStep
from debubble.simulator import Cause, by_cause
from debubble.views import Scene
from debubble.views.summary import bound_words
from tests.views.scenes import small_plan, trace_of


def without(trace: Trace, *kinds: Kind) -> Trace:
    step = trace.typical
    events = tuple(e for e in step.events if Op.parse(e.name).kind not in kinds)
    return replace(trace, steps=(TraceStep(step=step.step, events=events),))


def test_trace_as_planned_gives_the_predicted_timeline() -> None:
    plan = small_plan()

    predicted, measured = Scene.pair(plan, trace_of(plan, samples=False))

    assert measured.timeline.starts == predicted.timeline.starts
    assert measured.timeline.ends == predicted.timeline.ends
    assert measured.memory == predicted.memory
    assert measured.bubbles == predicted.bubbles
    # Samples, which are twice as large, replace the plan's memory curve.
    assert Scene.pair(plan, trace_of(plan))[1].peak_memory == tuple(2 * peak for peak in plan.simulate().peak_memory)


def test_messages_that_were_not_timed_take_no_time() -> None:
    plan = small_plan(communication=0)
    trace = without(trace_of(plan), Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

    predicted, measured = Scene.pair(plan, trace)

    assert measured.timeline.starts == predicted.timeline.starts


def test_bound_assumes_devices_with_dedicated_cores() -> None:
    plan = replace(small_plan(), lower_bound=10)

    predicted, _ = Scene.pair(plan, replace(trace_of(plan), cores=1))

    assert predicted.step_time > plan.step_time == 19
    words = "With a core for each device: No plan takes less than 10 s: the gap is 47.4%."
    assert bound_words(plan, predicted).startswith(words)


def test_the_bound_of_a_target_is_of_its_own_plans() -> None:
    plan = replace(small_plan(), lower_bound=10, target="megatron")
    words = bound_words(plan, Scene.predicted(plan))
    assert words.startswith("No such plan for Megatron-LM takes less than 10: ")


def test_delays_between_operations_are_overhead() -> None:
    plan = small_plan(devices=1)
    events = [TraceEvent(o.name, 0, o.lane, 2.0 * i, 2.0 * i + 1) for i, o in enumerate(plan.simulate().operations)]
    trace = Trace(devices=1, steps=(TraceStep(step=0, events=tuple(events)),))

    _, measured = Scene.pair(plan, trace)

    assert by_cause(measured.bubbles[0])[Cause.OVERHEAD] == 7


def test_a_trace_of_another_plan_is_refused() -> None:
    plan = small_plan()
    step = trace_of(plan).typical
    strange = replace(step, events=(*step.events, TraceEvent("0W0", 0, Lane.COMPUTE, 0, 1)))

    with pytest.raises(InputError, match="not of this plan: step 5 did not measure 0B0"):
        Scene.pair(plan, without(trace_of(plan), Kind.B))
    with pytest.raises(InputError, match="it measured 0W0, which the plan does not have"):
        Scene.pair(plan, Trace(devices=2, steps=(strange,)))
    with pytest.raises(InputError, match="The trace is of 3 devices, but the plan is for 2"):
        Scene.pair(plan, trace_of(small_plan(devices=3)))
