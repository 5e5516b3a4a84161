import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import InputError, Kind, Lane, Moment, Number, Op, Placement, Program, Schedule, StageCosts
from debubble.simulator import Timeline
from tests.strategies import random_schedules, stage_costs


def timeline_of(*orders: str, costs: StageCosts, micro_batches: int, placement: Placement | None = None) -> Timeline:
    placement = placement or Placement.linear(len(orders))
    return db.simulate(Schedule.of("test", placement, micro_batches, [o.split() for o in orders]), costs)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 3), (8, 16)])
@pytest.mark.parametrize(("f", "b"), [(3, 4), (Fraction(1, 3), Fraction(1, 2))])
def test_1f1b_takes_the_time_of_its_closed_form(p: int, m: int, f: Number, b: Number) -> None:
    costs = StageCosts.of(stages=p, forward=f, backward_input=b, backward_weight=0)
    timeline = db.simulate(db.schedules["1f1b"](devices=p, micro_batches=m), costs)
    assert timeline.makespan == (m + p - 1) * (f + b)
    assert timeline.peak_memory == tuple(min(m, p - s) for s in range(p))


@pytest.mark.parametrize(("p", "m"), [(1, 5), (4, 8)])
def test_gpipe_takes_the_time_of_its_closed_form(p: int, m: int) -> None:
    costs = StageCosts.of(stages=p)
    timeline = db.simulate(db.schedules["gpipe"](devices=p, micro_batches=m), costs)
    assert timeline.makespan == (m + p - 1) * 3
    assert timeline.peak_memory == (m,) * p


def test_fractions_per_micro_batch_are_simulated() -> None:
    schedule = Schedule.of("test", Placement.linear(1), 3, [[f"0{kind}{j}" for j in range(3) for kind in "FOLRB"]])
    schedule = replace(schedule, recompute_fraction={0: (1, Fraction(1, 2), 0)}, offload_fraction={0: (0, 1, 1)})
    costs = StageCosts.of(stages=1, activation=8, activation_recomputed=4, recompute=2, offload=8)
    timeline = db.simulate(schedule, costs)
    durations = {o.op.name: o.duration for o in timeline.operations}
    assert [durations[f"0R{j}"] for j in range(3)] == [2, 1, 0]
    assert [durations[f"0O{j}"] for j in range(3)] == [0, 6, 8]
    assert [schedule.kept_bytes(costs, 0, j) for j in range(3)] == [4, 6, 8]
    assert timeline.recompute == (3,)


def test_a_deeper_r_has_the_costs_of_deeper_recomputation() -> None:
    schedule = Schedule.of("test", Placement.linear(1), 2, [["0F0", "0R0", "0B0", "0F1", "0R1", "0B1"]])
    schedule = replace(schedule, deeper=frozenset({(0, 1)}))
    costs = StageCosts.of(
        stages=1, activation=8, activation_recomputed=4, recompute=2, activation_deeper=1, recompute_deeper=5
    )
    timeline = db.simulate(schedule, costs)
    durations = {o.op.name: o.duration for o in timeline.operations}
    assert (durations["0R0"], durations["0R1"]) == (2, 5)
    assert [schedule.kept_bytes(costs, 0, j) for j in range(2)] == [4, 1]
    assert timeline.recompute == (7,)


def test_deeper_recomputation_needs_costs_of_that_level() -> None:
    schedule = Schedule.of("test", Placement.linear(1), 1, [["0F0", "0R0", "0B0"]])
    with pytest.raises(InputError, match="the costs have no 'recompute_deeper'"):
        db.simulate(replace(schedule, deeper=frozenset({(0, 0)})), StageCosts.of(stages=1))


def test_latency_delays_a_message_and_lets_messages_overlap() -> None:
    costs = StageCosts.of(stages=2, communication=5)
    timeline = timeline_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", costs=costs, micro_batches=2)
    assert [timeline.by_name[name].start for name in ("1F0", "1F1")] == [6, 7]


def test_an_exclusive_link_carries_one_message_at_a_time() -> None:
    costs = StageCosts.of(stages=2, communication=5, communication_model="exclusive")
    timeline = timeline_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", costs=costs, micro_batches=2)
    assert [timeline.by_name[name].start for name in ("1F0", "1F1")] == [6, 11]


def test_a_receiver_message_moves_once_the_receiver_waits() -> None:
    costs = StageCosts.of(stages=2, communication=5, communication_model="receiver")
    timeline = timeline_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", costs=costs, micro_batches=2)
    assert [timeline.by_name[name].start for name in ("0F1", "1F0", "1B0", "1F1", "0B0")] == [1, 6, 7, 14, 14]


def test_a_recomputation_overlaps_the_backwards_message() -> None:
    costs = StageCosts.of(stages=2, forward=1, recompute=10, communication=5, communication_model="receiver")
    timeline = timeline_of("0F0 0R0 0B0", "1F0 1B0", costs=costs, micro_batches=1)
    assert [timeline.by_name[name].start for name in ("1F0", "1B0", "0R0", "0B0")] == [6, 7, 1, 14]


def test_operations_have_the_names_of_their_lanes() -> None:
    timeline = timeline_of("0F0 0B0", "1F0 1B0", costs=StageCosts.of(stages=2, communication=1), micro_batches=1)
    lanes = {op.name: op.lane for op in timeline.operations if op.device == 1}
    assert lanes == {"1RECV_F0": "recv", "1F0": "compute", "1B0": "compute", "1SEND_B0": "send"}
    assert str(timeline.by_name["1F0"].lane) == "compute"


def test_a_blocking_message_keeps_both_compute_lanes_busy() -> None:
    costs = StageCosts.of(stages=2, communication=5, communication_model="blocking")
    timeline = timeline_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", costs=costs, micro_batches=2)
    assert [timeline.by_name[name].start for name in ("0F1", "1F0", "0SEND_F1", "1RECV_F1")] == [6, 6, 7, 7]
    assert timeline.by_name["0SEND_F0"].lane is Lane.COMPUTE


def test_fused_recomputation_prolongs_the_backward() -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2, recomputed_stages=1)
    timeline = db.simulate(schedule, StageCosts.of(stages=2, activation=8, activation_recomputed=2))
    assert timeline.by_name["0B0"].duration == 3
    assert timeline.peak_memory[0] == 2 + 8
    assert timeline.recompute == (2, 0)


def test_the_workspace_bounds_the_bytes_of_a_recomputation() -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2, recomputed_stages=1)
    costs = StageCosts.of(stages=2, activation=8, activation_recomputed=2, recompute_workspace=3)
    assert db.simulate(schedule, costs).peak_memory[0] == 2 + 2 + 3


def test_an_explicit_r_runs_before_the_gradient_arrives() -> None:
    costs = StageCosts.of(stages=2, activation=8, activation_recomputed=2)
    timeline = timeline_of("0F0 0R0 0B0", "1F0 1B0", costs=costs, micro_batches=1)
    assert (timeline.by_name["0R0"].start, timeline.by_name["0B0"].start) == (1, 4)
    assert timeline.memory[0] == ((0, 0), (0, 2), (1, 8), (6, 0))


def test_a_split_backward_frees_memory_after_i_and_after_w() -> None:
    costs = StageCosts.of(stages=1, activation=8, activation_after_input=3)
    timeline = timeline_of("0F0 0I0 0W0", costs=costs, micro_batches=1)
    assert timeline.memory[0] == ((0, 0), (0, 8), (2, 3), (3, 0))


def test_the_input_backward_may_allocate_what_w_needs() -> None:
    costs = StageCosts.of(stages=1, activation=8, activation_after_input=12)
    timeline = timeline_of("0F0 0I0 0W0", costs=costs, micro_batches=1)
    assert timeline.memory[0] == ((0, 0), (0, 8), (1, 12), (3, 0))


def test_a_forward_waits_for_the_offload_that_frees_memory() -> None:
    costs = StageCosts.of(stages=1, offload=3, memory_limit=2)
    order = "0F0 0O0 0F1 0O1 0F2 0O2 0L0 0B0 0L1 0B1 0L2 0B2"
    timeline = timeline_of(order, costs=costs, micro_batches=3)
    assert [timeline.by_name[n].start for n in ("0F2", "0L0", "0B0", "0L1")] == [4, 7, 10, 10]
    assert timeline.peak_memory == (2,)


def test_a_reload_starts_with_the_compute_operation_before_it() -> None:
    costs = StageCosts.of(stages=1, offload=1)
    timeline = timeline_of("0F0 0O0 0F1 0B1 0L0 0B0", costs=costs, micro_batches=2)
    assert timeline.by_name["0L0"].start == timeline.by_name["0B1"].start == 2


def test_a_half_duplex_link_moves_one_transfer_at_a_time() -> None:
    costs = StageCosts.of(stages=1, offload=4, host_link="half-duplex")
    timeline = timeline_of("0F0 0O0 0F1 0O1 0L0 0B0 0L1 0B1", costs=costs, micro_batches=2)
    assert [timeline.by_name[n].start for n in ("0O0", "0O1", "0L0", "0L1")] == [1, 5, 9, 13]


def test_devices_on_one_switch_share_their_lane_by_arrival() -> None:
    costs = StageCosts.of(stages=2, offload=4, link_groups=[[0, 1]])
    timeline = timeline_of("0F0 0O0 0L0 0B0", "1F0 1O0 1L0 1B0", costs=costs, micro_batches=1)
    assert [timeline.by_name[n].start for n in ("0O0", "1O0")] == [1, 5]
    assert timeline.by_name["0L0"].end <= timeline.by_name["1L0"].start


def test_devices_on_one_switch_follow_the_link_order() -> None:
    schedule = db.schedules["gpipe"](devices=2, micro_batches=1)
    orders = (tuple(map(Op.parse, (f"{s}F0", f"{s}O0", f"{s}L0", f"{s}B0"))) for s in (0, 1))
    links = (tuple(map(Op.parse, ("1O0", "0O0"))), tuple(map(Op.parse, ("1L0", "0L0"))))
    ordered = replace(schedule, orders=tuple(orders), link_orders=links)
    timeline = db.simulate(ordered, StageCosts.of(stages=2, offload=4, link_groups=[[0, 1]]))
    assert [timeline.by_name[name].start for name in ("1O0", "0O0", "1L0", "0L0")] == [2, 6, 6, 10]


def test_a_link_order_may_be_empty() -> None:
    schedule = db.schedules["gpipe"](devices=2, micro_batches=1)
    assert db.simulate(replace(schedule, link_orders=((),)), StageCosts.of(stages=2)).makespan == 6


def test_contradicting_orders_of_link_and_device_deadlock() -> None:
    schedule = Schedule.of("two", Placement.linear(1), 2, [["0F0", "0O0", "0F1", "0O1", "0L1", "0B1", "0L0", "0B0"]])
    schedule = replace(schedule, link_orders=((Op.parse("0O1"), Op.parse("0O0")),))
    with pytest.raises(db.DeadlockError, match="0O"):
        db.simulate(schedule, StageCosts.of(stages=1, offload=1))


def test_a_swap_to_a_peer_occupies_the_peer() -> None:
    schedule = Schedule.of("swap", Placement.linear(2), 1, [["0F0", "0O0", "0L0", "0B0"], ["1F0", "1B0"]])
    timeline = db.simulate(replace(schedule, peers={0: 1}), StageCosts.of(stages=2, offload=1))
    assert timeline.peak_memory == (1, 2)


def test_out_of_memory_names_device_operation_and_limit() -> None:
    costs = StageCosts.of(stages=4, memory_limit=3)
    with pytest.raises(
        db.OutOfMemoryError, match=r"Device 0 .* 0F3 \(.*, micro-batch 3\): its peak would be 4, above .* limit of 3"
    ):
        db.simulate(db.schedules["1f1b"](devices=4, micro_batches=8), costs)


def test_micro_batches_of_different_length_scale_times_and_sizes() -> None:
    costs = StageCosts.of(stages=1, micro_batch_scale=[1, 3])
    timeline = timeline_of("0F0 0F1 0B0 0B1", costs=costs, micro_batches=2)
    assert timeline.makespan == 3 + 9
    assert timeline.peak_memory == (4,)


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(db.InputError, match="costs are for 3 stages, but the schedule has 2"):
        db.simulate(db.schedules["1f1b"](devices=2, micro_batches=1), StageCosts.of(stages=3))


def test_a_host_step_follows_the_gradient_offload() -> None:
    costs = StageCosts.of(stages=1, gradient_offload=2, host_step=5, parameter_load=3)
    timeline = timeline_of("0P0 0F0 0B0 0D0 0S0", costs=costs, micro_batches=1)
    assert [timeline.by_name[n].start for n in ("0F0", "0D0", "0S0")] == [3, 6, 8]
    assert timeline.by_name["0S0"].lane is Lane.HOST


def test_a_reload_after_a_host_step_waits_for_its_memory() -> None:
    costs = StageCosts.of(stages=2, offload=1, memory_limit=1, communication=0)
    orders = "0F0 0O0 1F0 1B0 1D0 1S0 0L0 0B0"
    timeline = timeline_of(orders, costs=costs, micro_batches=1, placement=Placement.of([0, 0]))
    assert timeline.by_name["0L0"].start == timeline.by_name["1B0"].end
    assert timeline.peak_memory == (1,)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StageCosts]:
    schedule = draw(random_schedules())
    return schedule, draw(stage_costs(stages=schedule.stages, offload=True))


def brute_force(program: Program) -> list[Number]:
    """Starts by repeated relaxation: operations are delayed until all that they wait for has happened."""
    starts: list[Number] = [0] * len(program.instructions)
    previous = {
        after: before
        for queue in program.queues
        if queue.exclusive
        for before, after in itertools.pairwise(queue.instructions)
    }
    for _ in range(len(starts) + 1):
        for i, instruction in enumerate(program.instructions):
            needs = [starts[w.instruction] for w in instruction.waits]
            needs += [_end(program, starts, w.instruction) for w in instruction.waits if w.moment is Moment.END]
            streams = [w.instruction for w in instruction.waits if w.moment is Moment.STREAM]
            needs += [_end(program, starts, streamed) - instruction.lead for streamed in streams]
            if i in previous:
                needs.append(_end(program, starts, previous[i]))
            starts[i] = max([0, *needs])
    return starts


def _end(program: Program, starts: list[Number], i: int) -> Number:
    return starts[i] + program.instructions[i].duration


@given(case=cases())
@settings(max_examples=25)
def test_simulation_agrees_with_brute_force(case: tuple[Schedule, StageCosts]) -> None:
    program = db.lower(*case)
    assert list(db.simulate(program).starts) == brute_force(program)


@given(case=cases())
@settings(max_examples=25)
def test_every_random_schedule_respects_dependencies_and_lanes(case: tuple[Schedule, StageCosts]) -> None:
    schedule, costs = case
    timeline = db.simulate(schedule, costs)
    scheduled = {o.op: o for o in timeline.operations}
    device_of = schedule.placement.device_of
    wire = [
        0 if sender == receiver else time
        for (sender, receiver), time in zip(itertools.pairwise(device_of), costs.communication, strict=False)
    ]
    for op in schedule.operations:
        kind, s, j = op
        if kind is Kind.F and s:
            assert scheduled[op].start >= scheduled[Op(Kind.F, s - 1, j)].end + wire[s - 1]
        if kind in (Kind.B, Kind.I) and s + 1 < schedule.stages:
            assert scheduled[op].start >= scheduled[schedule.backward_of(s + 1, j)].end + wire[s]
    for lane in timeline.compute:
        assert all(a.end <= b.start for a, b in itertools.pairwise(lane))
    assert all(trace[-1][1] == trace[0][1] for trace in timeline.memory)


@given(case=cases(), data=st.data())
@settings(max_examples=30)
def test_a_lowered_program_fits_its_limit_at_any_speed(case: tuple[Schedule, StageCosts], data: st.DataObject) -> None:
    schedule, costs = case
    peaks = db.simulate(schedule, costs).peak_memory
    limit = data.draw(st.integers(1, int(max(peaks)) + 1))
    try:
        program = db.lower(schedule, costs.with_limit(limit))
    except db.OutOfMemoryError:
        return
    factors = data.draw(st.lists(st.integers(0, 5), min_size=20, max_size=20))
    slowed = replace(program, duration=program.duration * np.resize(factors, len(program.duration)) + 1)
    timeline = db.simulate(slowed)
    assert max(timeline.peak_memory) <= limit
