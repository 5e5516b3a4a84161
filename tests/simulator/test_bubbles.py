import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Kind, Lane, Moment, Number, Schedule, StageCosts
from debubble.simulator import Cause, Timeline, bubbles, by_cause, critical_path
from debubble.views import Scene
from debubble.views.summary import why_not_faster
from tests.strategies import random_schedules, stage_costs


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Timelines with exact times, although transfer times are fractions of activations."""
    schedule = draw(random_schedules())
    costs = draw(stage_costs(stages=schedule.stages, offload=True))
    return db.simulate(schedule, costs.replace(activation=[Fraction(a) for a in costs.activation]))


def causes(timeline: Timeline, device: int) -> dict[Cause, Number]:
    """Idle time of a device by cause, without causes that do not occur."""
    return {cause: time for cause, time in by_cause(bubbles(timeline)[device]).items() if time}


def one_f_one_b(devices: int, micro_batches: int, **costs: object) -> Timeline:
    stage_costs = StageCosts.of(stages=devices, **costs)  # type: ignore[arg-type]
    return db.simulate(db.schedules["1f1b"](devices=devices, micro_batches=micro_batches), stage_costs)


@settings(max_examples=20)
@given(timelines())
def test_bubbles_are_exactly_the_gaps_of_the_compute_lane(timeline: Timeline) -> None:
    for device, idle in enumerate(bubbles(timeline)):
        intervals = sorted([(b.start, b.end) for b in idle] + [(o.start, o.end) for o in timeline.compute[device]])
        assert intervals[0][0] == 0
        assert intervals[-1][1] == timeline.makespan
        assert all(before[1] == after[0] for before, after in itertools.pairwise(intervals))
        for bubble in idle:
            # The awaited operation runs during the bubble.
            assert bubble.awaited is not None
            assert bubble.awaited.start <= bubble.start < bubble.end <= bubble.awaited.end


@settings(max_examples=20)
@given(timelines())
def test_the_critical_path_has_no_gap_from_start_to_end(timeline: Timeline) -> None:
    path = critical_path(timeline)
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for before, after in itertools.pairwise(path):
        streams = {before.op.kind, after.op.kind} & {Kind.O, Kind.L}
        assert before.start <= after.start <= before.end if streams else before.end == after.start


def test_uniform_1f1b_has_only_warm_up_and_cool_down() -> None:
    timeline = one_f_one_b(4, 8, forward=2, backward_input=3, backward_weight=1)
    assert causes(timeline, 0) == {Cause.WARM_UP: 3 * 4, Cause.COOL_DOWN: 3 * 2}
    assert causes(timeline, 3) == {Cause.WARM_UP: 3 * 2, Cause.COOL_DOWN: 3 * 4}


def test_a_stage_with_less_work_waits_for_imbalance() -> None:
    """With f = b = 1 on device 0 and 3 on device 1, device 0 is busy for 2 of every 6."""
    timeline = one_f_one_b(2, 8, forward=[1, 3], backward_input=[1, 3], backward_weight=0)
    assert timeline.makespan == 2 + 8 * 6
    assert causes(timeline, 0)[Cause.IMBALANCE] == 5 * 4
    assert causes(timeline, 1) == {Cause.WARM_UP: 1, Cause.COOL_DOWN: 1}


@pytest.mark.parametrize("model", ["latency", "blocking"])
def test_messages_in_the_warm_up_are_transfer_time(model: str) -> None:
    timeline = one_f_one_b(2, 1, communication=5, communication_model=model, backward_weight=0)
    assert causes(timeline, 0) == {Cause.TRANSFER: 10, Cause.WARM_UP: 2}
    assert causes(timeline, 1) == {Cause.WARM_UP: 1, Cause.TRANSFER: 10, Cause.COOL_DOWN: 1}


def test_waiting_for_an_offload_or_reload_is_transfer_time() -> None:
    orders = [["0F0", "0O0", "0L0", "0B0"]]
    schedule = Schedule.of("offload", db.Placement.linear(1), 1, orders)
    timeline = db.simulate(schedule, StageCosts.of(stages=1, offload=3, reload=4))
    assert causes(timeline, 0) == {Cause.TRANSFER: 7}
    assert [b.awaited.lane for b in bubbles(timeline)[0] if b.awaited] == [Lane.D2H, Lane.H2D]


def test_equal_stages_in_a_serial_order_wait_for_dependencies() -> None:
    """The devices run one micro-batch after the other."""
    orders = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    schedule = Schedule.of("in-turn", db.Placement.linear(2), 2, orders)
    timeline = db.simulate(schedule, StageCosts.of(stages=2, backward_weight=0))
    assert causes(timeline, 0) == {Cause.WARM_UP: 2, Cause.COOL_DOWN: 2}
    assert causes(timeline, 1) == {Cause.WARM_UP: 1, Cause.DEPENDENCY: 2, Cause.COOL_DOWN: 1}


@settings(max_examples=20)
@given(timelines(), st.data())
def test_causes_of_any_measured_timeline_sum_to_idle_time(predicted: Timeline, data: st.DataObject) -> None:
    """Measured operations take longer and start later, and the clocks of devices differ."""
    instructions = predicted.program.instructions
    some = st.integers(0, 3)
    skew = [data.draw(some) for _ in range(predicted.program.devices)]
    before = predicted.program.preceding
    starts: list[Number] = [0] * len(instructions)
    ends: list[Number] = [0] * len(instructions)
    for i in predicted.program.topological_order():
        ready = (starts[other] if moment is Moment.START else ends[other] for other, moment in before[i])
        starts[i] = max(ready, default=0) + data.draw(some)
        ends[i] = starts[i] + instructions[i].duration + data.draw(some)
    measured = Timeline.of(
        predicted.program,
        [start + skew[i.device] for start, i in zip(starts, instructions, strict=True)],
        [end + skew[i.device] for end, i in zip(ends, instructions, strict=True)],
    )
    for device, idle in enumerate(bubbles(measured)):
        assert sum(by_cause(idle).values()) == measured.makespan - measured.busy[device]
        assert all(bubble.duration > 0 for bubble in idle)


def test_a_measured_delay_that_nothing_explains_is_overhead() -> None:
    predicted = one_f_one_b(1, 1, backward_weight=0)
    measured = Timeline.of(predicted.program, (0, 3), (1, 4))
    assert causes(measured, 0) == {Cause.OVERHEAD: 2}


def test_waiting_for_the_optimizer_on_the_host_is_a_cause() -> None:
    """Parameters load in 2, forward takes 1 and backward 2, gradients offload in 3 and the host steps for 4."""
    orders = [["0P0", "0F0", "0B0", "0D0", "0S0"]]
    schedule = Schedule.of("hosted", db.Placement.linear(1), 1, orders)
    costs = StageCosts.of(stages=1, parameter_load=2, gradient_offload=3, host_step=4)
    timeline = db.simulate(schedule, costs)
    assert timeline.makespan == 2 + 3 + 3 + 4
    assert causes(timeline, 0) == {Cause.HOST_OPTIMIZER: 2 + 3 + 4}
    assert why_not_faster(Scene(timeline, title="")) == (
        "The critical path spends 25.0% computing on device 0, 33.3% optimizer on the host, 25.0% gradients to host,"
        " 16.7% parameters from host."
    )


def test_a_step_on_the_device_is_work() -> None:
    schedule = Schedule.of("stepped", db.Placement.linear(1), 1, [["0F0", "0B0", "0S0"]])
    timeline = db.simulate(schedule, StageCosts.of(stages=1, optimizer_step=4))
    assert causes(timeline, 0) == {}


def stage_0(name: str, *, recompute: Number, **options: Any) -> tuple[Number, Number]:
    """Forward and backward bubbles of stage 0 in Obscura's Figure 5: 4 stages, 13 micro-batches, b = 2 f."""
    schedule = db.schedules[name](devices=4, micro_batches=13, **options)
    timeline = db.simulate(schedule, StageCosts.of(stages=4, recompute=recompute))
    return timeline.forward_bubbles[0], timeline.backward_bubbles[0]


def test_bubbles_are_those_of_figure_5_of_obscura() -> None:
    """Recomp-0 leaves forward bubbles, Strawman-0 none; with only MLPs recomputed, backward bubbles are unused."""
    mlp = Fraction(394, 1000)
    assert stage_0("1f1b", recompute=1) == (6, 3)
    assert stage_0("1f1b", recompute=1, recomputed_stages=1) == (6, 0)
    assert stage_0("strawman", recompute=1, adjusted_stages=1) == (0, 0)
    assert stage_0("strawman", recompute=mlp, adjusted_stages=1) == (0, 9 * (1 - mlp))


def test_idle_time_before_the_first_forward_is_no_forward_bubble() -> None:
    """Device 1 waits 6 for its first forward; device 0 waits 11 for its first backward and 1 for its second."""
    orders = [["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]]
    schedule = Schedule.of("split", db.Placement.linear(2), 2, orders)
    timeline = db.simulate(schedule, StageCosts.of(stages=2, communication=5))
    assert timeline.makespan == 18
    assert timeline.forward_bubbles == (11, 0)
    assert timeline.backward_bubbles == (1, 0)
