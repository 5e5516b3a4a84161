import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Kind
from debubble.papers.chronospipe.offload import (
    available_offload,
    available_upload,
    hidden_share,
    offload_activations,
    offload_states,
    step_window,
    upload_window,
)
from debubble.papers.chronospipe.schedule import delay_rounds, periodic, reduce_gradients, timetable_spec
from debubble.papers.chronospipe.timetable import timetables

PAGE = (Path(__file__).parents[3] / "docs/notes/chronospipe.md").read_text()
RATIOS = [(1, 2), (1, 1), (1, Fraction(3, 2)), (1, Fraction(5, 2)), (1, 3), (3, 5)]
"""Values of (f, b), the times of one chunk."""


def unit_costs(p: Any, v: int = 2, *, f: int = 1, b: int = 2, recompute: int = 1, **entries: Any) -> Any:
    half = b // 2 if b == 2 else Fraction(b) / 2
    return db.StageCosts.of(
        stages=p * v, forward=f, backward_input=half, backward_weight=half, recompute=recompute, **entries
    )


def simulated(name: Any, p: Any, m: Any, v: int = 2, *, costs: Any = None, **options: Any) -> Any:
    costs = costs or unit_costs(p, v)
    return db.simulate(db.schedules[name](devices=p, micro_batches=m, chunks=v, costs=costs, **options), costs)


def greedy_peak(p: Any, v: Any, f: Any, b: Any) -> Any:
    """The peak of stage 0 by an independent copy of the published rule: sum over chunks of (nB - nF + 1) / v."""

    def slots(first: Any, step: Any) -> Any:
        taken = [first]
        for _ in range(v - 1):
            n = taken[-1] + step
            while n % v in {t % v for t in taken}:
                n += 1
            taken.append(n)
        return taken

    forward = slots(0, math.ceil(Fraction(p) * f / (f + b)))
    backward = slots(forward[-1] + p - 1, math.ceil(Fraction(p) * b / (f + b)))
    return Fraction(sum(backward) - sum(forward) + v, v)


@settings(max_examples=30)
@given(p=st.integers(2, 16), v=st.integers(2, 4), m=st.integers(1, 32), fb=st.sampled_from(RATIOS))
def test_chronos_takes_the_time_of_1f1b_and_the_rules_memory(p: Any, v: Any, m: Any, fb: Any) -> None:
    """Section 4.2: the time of 1F1B; the peak of stage s is s blocks below that of stage 0."""
    f, b = fb
    run = simulated("chronos", p, m, v, costs=unit_costs(p, v, f=f, b=b))
    assert run.makespan == v * (f + b) * (m + p - 1)
    peak = greedy_peak(p, v, f, b)
    if m >= peak:
        assert run.peak_memory == tuple(peak - s for s in range(p))


@pytest.mark.parametrize(("p", "intervals", "peaks", "makespan"), [(4, (5, 1), (5, 2), 402), (8, (1, 5), (9, 4), 426)])
def test_chronos_has_the_published_intervals_and_chunk_peaks(p: int, intervals: Any, peaks: Any, makespan: int) -> None:
    run = simulated("chronos", p, 64)
    j = 20  # in the steady phase
    ops = {name: run.by_name[name] for name in (f"{p - 1}F{j}", f"{p}F{j}", f"{p}B{j}", f"{p - 1}B{j}", f"{p}B{j}")}
    assert ops[f"{p}F{j}"].start - ops[f"{p - 1}F{j}"].end == intervals[0]
    assert ops[f"{p - 1}B{j}"].start - ops[f"{p}B{j}"].end == intervals[1]
    assert (chunk_peak(run, 0), chunk_peak(run, p)) == peaks
    assert run.makespan == makespan


def chunk_peak(run: Any, stage: Any) -> Any:
    in_flight = peak = 0
    for op in run.program.schedule.orders[run.program.schedule.placement.device_of[stage]]:
        if op.stage == stage:
            in_flight += {Kind.F: 1, Kind.B: -1}[op.kind]
            peak = max(peak, in_flight)
    return peak


def test_chronos_p4_m6_is_the_golden_order() -> None:
    schedule = db.schedules["chronos"](devices=4, micro_batches=6)
    assert [" ".join(f"{op.kind.value}{op.stage // 4 + 1}.{op.micro_batch}" for op in o) for o in schedule.orders] == [
        "F1.0 F1.1 F2.0 F1.2 F2.1 F1.3 B2.0 F2.2 F1.4 B2.1 F2.3 B1.0 F1.5 B2.2 F2.4 B1.1 B2.3 F2.5 B1.2 B2.4 B1.3"
        " B2.5 B1.4 B1.5",
        "F1.0 F1.1 F2.0 F1.2 F2.1 B2.0 F1.3 F2.2 B2.1 F1.4 B1.0 F2.3 B2.2 F1.5 B1.1 F2.4 B2.3 B1.2 F2.5 B2.4 B1.3"
        " B2.5 B1.4 B1.5",
        "F1.0 F1.1 F2.0 F1.2 B2.0 F2.1 F1.3 B2.1 F2.2 B1.0 F1.4 B2.2 F2.3 B1.1 F1.5 B2.3 F2.4 B1.2 B2.4 F2.5 B1.3"
        " B2.5 B1.4 B1.5",
        "F1.0 F1.1 F2.0 B2.0 F1.2 F2.1 B2.1 F1.3 B1.0 F2.2 B2.2 F1.4 B1.1 F2.3 B2.3 F1.5 B1.2 F2.4 B2.4 B1.3 F2.5"
        " B2.5 B1.4 B1.5",
    ]


@pytest.mark.parametrize(
    ("v", "forward", "backward", "lives", "peak"),
    [
        (2, [0, 3], [9, 6], [30, 12], 7),
        (3, [0, 2, 4], [15, 11, 7], [48, 30, 12], 10),
        (4, [0, 2, 5, 7], [19, 16, 13, 10], [60, 45, 27, 12], 12),
    ],
)
def test_the_best_timetable_at_p4_has_the_published_slots(
    v: int, forward: Any, backward: Any, lives: Any, peak: int
) -> None:
    spec = timetable_spec(unit_costs(4, v), devices=4, chunks=v, shares={})
    unit = Fraction(1, spec.forward)
    tables = [t for t in timetables(spec)]

    def life(table: Any) -> Any:
        return [unit * (table.backward_start(c, 0, 0) + spec.backward - table.forward_start(c, 0, 0)) for c in range(v)]

    best = min(tables, key=lambda t: sum(life(t)))
    assert [cycle - best.forward_cycles[0] for cycle in best.forward_cycles] == forward
    assert [cycle - best.forward_cycles[0] for cycle in best.backward_cycles] == backward
    assert life(best) == lives
    assert sum(lives) == peak * 3 * v


@pytest.mark.parametrize("p", [2, 7])
def test_chronos_with_one_chunk_is_1f1b(p: int) -> None:
    assert (
        db.schedules["chronos"](devices=p, micro_batches=9, chunks=1).orders
        == db.schedules["1f1b"](devices=p, micro_batches=9).orders
    )


@pytest.mark.parametrize(("p", "v"), [(3, 5), (8, 6)])
def test_chronos_with_many_chunks_takes_the_time_of_1f1b(p: int, v: int) -> None:
    assert simulated("chronos", p, 2 * p, v).makespan == 3 * v * (3 * p - 1)


def test_chronos_order_does_not_depend_on_the_unit_of_time() -> None:
    seconds = db.StageCosts.of(stages=12, forward=0.1, backward_input=0.1, backward_weight=0.1)
    schedule = db.schedules["chronos"](devices=3, micro_batches=8, chunks=4, costs=seconds)
    assert schedule.orders == db.schedules["chronos"](devices=3, micro_batches=8, chunks=4).orders


# Chronos-Recomp


@pytest.mark.parametrize(("p", "makespans", "peak"), [(4, {8: 71, 64: 463}, 3), (8, {8: 94, 64: 486}, 5)])
def test_recomp_has_the_published_times_and_blocks(p: int, makespans: Any, peak: int) -> None:
    for m, makespan in makespans.items():
        assert simulated("chronos-recomp", p, m).makespan == makespan
    assert simulated("chronos-recomp", p, 64).peak_memory[0] == peak


@pytest.mark.parametrize(
    "name",
    [
        "chronos", "chronos-recomp", "chronos-zero2", "v-half",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("zb-v", "v-min")),
    ],
)  # fmt: skip
def test_the_page_has_the_times_and_peaks(name: str) -> None:
    halves = [{}, {"split_backward": True}] if name.startswith("chronos") else [{}]
    costs = {p: unit_costs(p, activation=Fraction(1, 2 * p)) for p in (4, 8, 16)}
    runs = {p: [simulated(name, p, 64, costs=costs[p], **options) for options in halves] for p in costs}
    # Split backwards need no more memory.
    assert all(split.peak_memory == fused.peak_memory for fused, *splits in runs.values() for split in splits)
    peak = math.floor(100 * max(runs[8][0].peak_memory) + Fraction(1, 2))
    cells = [", ".join(str(run.makespan) for run in runs[p]) for p in runs]
    assert f"`{name}` | {' | '.join(cells)} | {peak}% |" in PAGE


@settings(max_examples=25)
@given(p=st.integers(2, 16), m=st.integers(1, 64))
def test_recomp_is_never_slower_than_the_papers_formula(p: Any, m: Any) -> None:
    assert simulated("chronos-recomp", p, m).makespan <= 6 * p + 7 * (m - 1)


def recomp_table(p: Any, *, rho: Any = Fraction(1)) -> Any:
    """Start times per stage of F1, F2, B1 and B2 in the v = 2 timetable, in units of f from F1(0, 0)."""
    spec = timetable_spec(unit_costs(p), devices=p, chunks=2, shares={0: rho})
    (table,) = timetables(spec)
    origin = table.forward_start(0, 0, 0)

    def by_stage(start: Any, chunk: Any) -> Any:
        return [Fraction(start(chunk, s, 0) - origin, spec.forward) for s in range(p)]

    return tuple(by_stage(s, c) for s, c in itertools.product((table.forward_start, table.backward_start), (0, 1)))


@pytest.mark.parametrize("p", [2, 3, 8, 17, 24])
@pytest.mark.parametrize("rho", [Fraction(1), Fraction(1, 4)])
def test_recomp_timetable_follows_the_stage_patterns(p: int, rho: Any) -> None:
    period = 6 + rho
    b_before = [sum((p - 1 - x) % 2 == 0 for x in range(s)) for s in range(p)]
    f1 = [s + rho * b_before[s] for s in range(p)]
    sigma = 3 if p % 2 == 0 else 3 + rho
    f2_first = sigma + period * max(0, math.ceil((f1[-1] + 1 - sigma) / period))
    f2 = [f2_first + s + rho * (s - b_before[s]) for s in range(p)]
    b2 = [f2[-1] + 1 + 2 * (p - 1 - s) for s in range(p)]
    soonest = f1[-1] + 1 + rho
    b1_last = soonest + period * math.ceil((b2[0] + 2 - soonest) / period)
    b1 = [b1_last + 2 * (p - 1 - s) for s in range(p)]
    assert recomp_table(p, rho=rho) == (f1, f2, b1, b2)


def test_delay_rounds_are_those_of_equation_8() -> None:
    twice = {27, 32, 33, *range(36, 40), 41, *range(42, 50)}
    never = {*range(3, 8), 10, 11, 12, 16, 17}
    assert [delay_rounds(p) for p in range(3, 50)] == [
        0 if p in never else 2 if p in twice else 1 for p in range(3, 50)
    ]
    assert [p for p in range(50, 65) if delay_rounds(p) == 3] == [50, 51, 55, 56, 57, 60, 61, 62, 63, 64]


def test_partial_recomputation_keeps_the_other_bytes() -> None:
    costs = unit_costs(4, activation=8, recompute=2)
    run = simulated("chronos-recomp", 4, 1, costs=costs, rho=Fraction(1, 4))
    assert run.by_name["0R0"].duration == Fraction(1, 2)
    # F of chunk 0 keeps 6 of 8; R restores 2 after chunk 1 has freed its 8.
    assert [size for _, size in run.memory[0]] == [0, 6, 14, 6, 8, 0]


@pytest.mark.parametrize("rho", [0, Fraction(3, 2)])
def test_rho_outside_0_to_1_is_refused(rho: Any) -> None:
    with pytest.raises(db.InputError, match="rho is the share"):
        db.schedules["chronos-recomp"](devices=4, micro_batches=4, rho=rho)


def test_recomputing_more_chunks_than_there_are_is_refused() -> None:
    with pytest.raises(db.InputError, match="there are only 2 chunks"):
        db.schedules["chronos-recomp"](devices=4, micro_batches=4, recomputed_chunks=3)


# ZeRO-2


@pytest.mark.parametrize(("p", "g"), [(4, 2), (7, 4), (16, 4), (9, 1)])
def test_zero2_groups_have_their_closed_forms(p: int, g: int) -> None:
    m = 4 * p
    run = simulated("chronos-zero2", p, m - m % g, group=g)
    forward_interval = 3 * g + 6 * g * max(0, math.ceil((p - 3 * g) / (6 * g)))
    backward_interval = 3 * g + 6 * g * max(0, math.ceil((2 * p - 3 * g) / (6 * g)))
    assert 6 * (run.peak_memory[0] - p) == forward_interval + backward_interval
    # The one exception among these cases takes one backward more.
    assert run.makespan - 6 * (m - m % g) == 6 * (p - 1) - 3 * (min(g, p) - 1) + 2 * ((p, g) == (7, 4))


def test_zero2_with_groups_of_one_is_chronos() -> None:
    schedule = db.schedules["chronos-zero2"](devices=5, micro_batches=7, group=1)
    orders = tuple(tuple(op for op in order if op.kind is not Kind.G) for order in schedule.orders)
    assert orders == db.schedules["chronos"](devices=5, micro_batches=7).orders


def test_zero2_reduces_once_per_chunk_and_group() -> None:
    costs = unit_costs(4, gradient_reduce=2)
    run = simulated("chronos-zero2", 4, 7, costs=costs, group=2)
    reduced = [op.name for op in run.program.schedule.orders[0] if op.kind is Kind.G]
    assert reduced == ["4G1", "4G3", "0G1", "4G5", "0G3", "4G6", "0G5", "0G6"]
    # Only the reduction of the last group follows the compute.
    assert run.makespan == simulated("chronos-zero2", 4, 7, group=2).makespan + 2


# Chronos-Offload


@pytest.mark.parametrize("p", [3, 8, 16])
def test_offload_windows_are_those_of_equations_4_and_6(p: int) -> None:
    run = simulated("chronos", p, 2 * p + 2)
    assert step_window(run, device=0, chunk=1) == 2 * available_offload(p)
    assert upload_window(run) == available_upload(p)


def test_offload_windows_at_p4_p8_p12_p16() -> None:
    assert [(available_offload(p), available_upload(p)) for p in (4, 8, 12, 16)] == [(2, 2), (4, 6), (7, 9), (10, 12)]


@pytest.mark.parametrize(("v", "idle"), [(2, 2), (3, 3), (4, 6)])
def test_figure_16_idle_backwards_at_p4(v: int, idle: int) -> None:
    assert step_window(simulated("chronos", 4, 24, v), device=0, chunk=v - 1) == 2 * idle


@pytest.mark.parametrize("p", [4, 12])
def test_offload_that_meets_conditions_5_and_7_costs_no_time(p: int) -> None:
    window = 2 * available_offload(p)
    costs = unit_costs(
        p, gradient_offload=Fraction(window, 4), host_step=Fraction(3 * window, 4), parameter_load=available_upload(p)
    )
    schedule = offload_states(db.schedules["chronos"](devices=p, micro_batches=16, costs=costs), chunks=[1])
    run = db.simulate(schedule, costs)
    assert run.makespan == 6 * (16 + p - 1)
    assert hidden_share(run) == 1


def test_offload_beyond_the_window_costs_its_excess() -> None:
    costs = unit_costs(4, gradient_offload=10, host_step=20)
    schedule = offload_states(db.schedules["chronos"](devices=4, micro_batches=16, costs=costs), chunks=[1])
    run = db.simulate(schedule, costs)
    last = run.by_name["4B15"].end
    assert run.makespan == last + 30
    assert hidden_share(run) == pytest.approx(4 / 30)


def test_parameters_load_before_their_first_forward() -> None:
    costs = unit_costs(4, parameter_load=9)
    schedule = offload_states(db.schedules["chronos"](devices=4, micro_batches=4, costs=costs), chunks=[1])
    run = db.simulate(schedule, costs)
    assert (run.by_name["4P0"].end, run.by_name["4F0"].start) == (9, 9)


def test_offloading_shallow_activations_saves_memory_at_no_time() -> None:
    costs = unit_costs(4, offload=3)
    schedule = db.schedules["chronos"](devices=4, micro_batches=16, costs=costs)
    run = db.simulate(offload_activations(schedule, chunks=[0], costs=costs), costs)
    assert run.makespan == 6 * (16 + 3)
    assert run.peak_memory == (4, 4, 3, 3)


@settings(max_examples=25)
@given(
    p=st.integers(2, 5), v=st.integers(1, 3), m=st.integers(1, 8), time=st.integers(0, 20),
    recomputed=st.integers(0, 1), data=st.data(),
)  # fmt: skip
def test_every_combination_of_offloads_is_a_correct_schedule(
    p: Any, v: Any, m: Any, time: Any, recomputed: Any, data: Any
) -> None:
    some = st.frozensets(st.integers(0, v - 1))
    costs = unit_costs(p, v, offload=time, gradient_offload=1, host_step=time, parameter_load=1)
    schedule = periodic(
        "all", devices=p, micro_batches=m, chunks=v, costs=costs, recompute=dict.fromkeys(range(recomputed), 1)
    )
    schedule = reduce_gradients(offload_activations(schedule, chunks=data.draw(some), costs=costs), group=2)
    run = db.simulate(offload_states(schedule, chunks=data.draw(some)), costs)
    assert run.makespan >= m * 3 * v
    assert all(memory[-1][1] == 0 for memory in run.memory)


def test_gradients_are_offloaded_after_their_last_reduction() -> None:
    costs = unit_costs(4, gradient_reduce=3, gradient_offload=1, host_step=1)
    schedule = db.schedules["chronos-zero2"](devices=4, micro_batches=8, costs=costs)
    run = db.simulate(offload_states(schedule, chunks=[1]), costs)
    assert run.by_name["4D7"].start == run.by_name["4G7"].end
    assert run.by_name["4S7"].start == run.by_name["4D7"].end


def test_offloading_a_chunk_that_does_not_exist_is_refused() -> None:
    with pytest.raises(db.InputError, match="cannot be offloaded"):
        offload_states(db.schedules["chronos"](devices=4, micro_batches=4), chunks=[2])


# Messages


def message_share(name: Any, p: Any, m: Any) -> Any:
    """The coefficient of T_c in the makespan with blocking messages that are too short to change the order."""
    v = 1 if name == "1f1b" else 2
    time = Fraction(1, 1000)
    costs = unit_costs(p, v, f=2 // v, b=4 // v, communication=time, communication_model="blocking")
    return (simulated(name, p, m, v, costs=costs).makespan - 6 * (m + p - 1)) / time


@pytest.mark.parametrize(("p", "m"), [(4, 64), (8, 8)])
def test_blocking_messages_cost_as_much_as_in_section_4_1(p: int, m: int) -> None:
    assert message_share("1f1b", p, m) == 2 * p + 4 * (m - 2)
    # The paper's count is exact at p = 4 and omits two messages at p = 8.
    assert message_share("chronos", p, m) == 4 * p + 8 * (m - 2) + 2 + (2 if p == 8 else 0)


def test_messages_between_chunks_do_not_block() -> None:
    costs = unit_costs(3, communication=1, communication_model="blocking")
    run = simulated("chronos", 3, 4, costs=costs)
    lanes = {name: run.by_name[name].lane.value for name in ("1SEND_F0", "2SEND_F0", "3SEND_F0", "3SEND_B0")}
    assert lanes == {"1SEND_F0": "compute", "2SEND_F0": "send", "3SEND_F0": "compute", "3SEND_B0": "send"}


@settings(max_examples=20)
@given(
    p=st.integers(1, 6), v=st.integers(1, 3), m=st.integers(1, 9), time=st.integers(0, 5), fb=st.sampled_from(RATIOS)
)
def test_partly_blocking_messages_never_deadlock(p: Any, v: Any, m: Any, time: Any, fb: Any) -> None:
    f, b = fb
    costs = unit_costs(p, v, f=f, b=b, communication=time, communication_model="blocking")
    run = simulated("chronos", p, m, v, costs=costs)
    assert run.makespan >= v * (f + b) * (m + p - 1)
    # Every device runs all of its operations.
    assert run.busy == (m * v * (f + b),) * p


@pytest.mark.parametrize("p", [3, 16, 27, 48])
def test_last_chunk_starts_k_rounds_of_equation_8_late(p: int) -> None:
    _, f2, _, _ = recomp_table(p)
    sigma = 3 if p % 2 == 0 else 4
    assert f2[0] == sigma + 7 * (math.ceil((p - 3) / 6) + delay_rounds(p))


@settings(max_examples=25)
@given(
    p=st.integers(2, 8), v=st.integers(1, 4), m=st.integers(1, 20), group=st.sampled_from([1, 2, 3]),
    rho=st.sampled_from([Fraction(1, 4), Fraction(1, 2), Fraction(1)]), data=st.data(),
)  # fmt: skip
def test_any_recomputed_chunks_and_groups_are_correct(p: Any, v: Any, m: Any, rho: Any, group: Any, data: Any) -> None:
    chosen = data.draw(st.frozensets(st.integers(0, v - 1)))
    costs = unit_costs(p, v)
    schedule = db.schedules["chronos-zero2"](
        devices=p, micro_batches=m, chunks=v, costs=costs, group=group, rho=rho, recomputed_chunks=chosen
    )
    run = db.simulate(schedule, costs)
    work = 3 * v + rho * len(chosen)
    assert run.busy == (m * work,) * p
    assert run.makespan <= (m + group - 1) * work + v * (p - 1) * (4 + rho) + group * work
