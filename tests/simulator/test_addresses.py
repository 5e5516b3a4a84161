from collections.abc import Iterator
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

import debubble as db
from debubble.ir import Number, Op, Placement, Schedule, StageCosts
from debubble.simulator import AddressPlan, PlacedTensor, Timeline, plan_addresses
from debubble.simulator.packing import pack
from tests.strategies import random_schedules, stage_costs


def timeline_of(*orders: str, costs: StageCosts, **options: object) -> Timeline:
    parsed = tuple(tuple(map(Op.parse, order.split())) for order in orders)
    count = max(op.micro_batch for op in parsed[0]) + 1
    placement = Placement.linear(len(orders))
    fields = {"name": "test", "placement": placement, "micro_batches": count, "orders": parsed, **options}
    return db.simulate(Schedule(**fields), costs)  # type: ignore[arg-type]


def described(plan: AddressPlan) -> list[tuple[str, str, Number]]:
    return [(tensor.allocated_by.name, tensor.freed_by.name, tensor.size) for tensor in plan.tensors]


class FixedArena:
    """An allocator that hands out planned addresses of an arena, and checks that they are free and in bounds."""

    def __init__(self, capacity: Number) -> None:
        self.capacity, self.taken = capacity, list[PlacedTensor]()

    def allocate(self, tensor: PlacedTensor) -> None:
        end = tensor.offset + tensor.size
        assert tensor.offset >= 0
        assert end <= self.capacity
        for other in self.taken:
            assert end <= other.offset or other.offset + other.size <= tensor.offset
        self.taken.append(tensor)

    def free(self, tensor: PlacedTensor) -> None:
        self.taken.remove(tensor)


def run(plan: AddressPlan, capacity: Number) -> None:
    """Allocate and free tensors in order of time, frees first."""
    arena = FixedArena(capacity)
    events = [(t.start, 1, n) for n, t in enumerate(plan.tensors)] + [(t.end, 0, n) for n, t in enumerate(plan.tensors)]
    for _, allocates, number in sorted(events):
        (arena.allocate if allocates else arena.free)(plan.tensors[number])
    assert not arena.taken


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    schedule = draw(random_schedules(shares=True, deeper=True))
    costs = draw(stage_costs(stages=schedule.stages, offload=True, deeper=True))
    assert costs.activation_deeper is not None
    # Deeper recomputation keeps no more than the activation.
    deeper = [min(pair) for pair in zip(costs.activation, costs.activation_deeper, strict=True)]
    return db.simulate(schedule, costs.replace(activation_deeper=deeper))


@pytest.mark.slow
@given(timelines())
@settings(max_examples=40)
def test_an_arena_of_the_planned_size_never_fails(timeline: Timeline) -> None:
    for plan, peak in zip(plan_addresses(timeline), timeline.peak_memory, strict=True):
        run(plan, plan.arena)
        assert plan.arena >= plan.peak == peak - plan.static


@given(timelines(), st.floats(0.01, 1e9))
@settings(max_examples=15)
def test_addresses_of_float_sizes_do_not_overlap(timeline: Timeline, unit: float) -> None:
    costs = timeline.program.costs
    scaled = [float(a) * unit for a in costs.activation]
    floats = costs.replace(activation=scaled, activation_recomputed=0, activation_deeper=0, activation_after_input=None)
    simulated = db.simulate(timeline.program.schedule, floats)
    for plan, peak in zip(plan_addresses(simulated), simulated.peak_memory, strict=True):
        run(plan, plan.arena)
        assert float(plan.peak) == pytest.approx(float(peak))


def test_the_halves_of_a_backward_free_separate_tensors() -> None:
    timeline = timeline_of("0F0 0I0 0W0", costs=StageCosts.of(stages=1, activation=6, activation_after_input=2))
    assert sorted(described(plan_addresses(timeline)[0])) == [("0F0", "0I0", 4), ("0F0", "0W0", 2)]


def test_a_partial_offload_moves_a_separate_tensor() -> None:
    costs = StageCosts.of(stages=1, activation=8, offload=1)
    timeline = timeline_of("0F0 0O0 0L0 0B0", costs=costs, offload_fraction={0: Fraction(1, 4)})
    assert sorted(described(plan_addresses(timeline)[0])) == [("0F0", "0B0", 6), ("0F0", "0O0", 2), ("0L0", "0B0", 2)]


def test_gradients_of_keys_live_from_the_last_backward() -> None:
    costs = StageCosts.of(
        stages=1, activation=10, slices=2, attention_scale=(1, 3), keys_and_values=4, key_value_gradient=6
    )
    timeline = timeline_of("0F0 0F1 0B1 0B0", costs=costs, slices=2)
    assert described(plan_addresses(timeline)[0]) == [("0F0", "0B0", 10), ("0F1", "0B1", 10), ("0B1", "0B0", 6)]
    assert plan_addresses(timeline)[0].peak == timeline.peak_memory[0] == 26


def test_gathered_parameters_are_tensors() -> None:
    costs = StageCosts.of(stages=1, activation=2, gathered=5, parameter_gather=1, static=5)
    timeline = timeline_of("0F0 0B0", costs=costs)
    [plan] = plan_addresses(timeline)
    assert described(plan) == [("0UNSHARD_F0", "0RESHARD_B0", 5), ("0F0", "0B0", 2)]
    assert (plan.static, plan.arena) == (0, 7)


def test_fractions_of_bytes_stay_exact() -> None:
    timeline = timeline_of("0F0 0F1 0B0 0B1", costs=StageCosts.of(stages=1, activation=Fraction(1, 3)))
    [plan] = plan_addresses(timeline)
    assert (plan.peak, plan.arena, plan.fragmentation, plan.gap) == (Fraction(2, 3), Fraction(2, 3), 0, 0.0)


def test_the_gap_is_a_fraction_of_the_total_peak() -> None:
    plan = AddressPlan(device=0, tensors=(), static=60, peak=40, arena=45)
    assert (plan.fragmentation, plan.gap) == (5, 0.05)


def small_instances() -> Iterator[tuple[list[int], list[int], list[int]]]:
    random = Random(0)
    for _ in range(25):
        starts = sorted(random.randrange(8) for _ in range(random.randrange(1, 10)))
        yield starts, [start + random.randrange(1, 6) for start in starts], [random.randrange(1, 9) for _ in starts]


def min_arena(start: list[int], end: list[int], size: list[int]) -> int:
    """The minimum arena, by a CP-SAT model of rectangles that do not overlap."""
    model, total = cp_model.CpModel(), sum(size)
    offsets = [model.new_int_var(0, total, "") for _ in size]
    arena = model.new_int_var(0, total, "")
    lifetimes = [model.new_fixed_size_interval_var(a, b - a, "") for a, b in zip(start, end, strict=True)]
    addresses = [model.new_fixed_size_interval_var(offset, z, "") for offset, z in zip(offsets, size, strict=True)]
    model.add_no_overlap_2d(lifetimes, addresses)
    for offset, z in zip(offsets, size, strict=True):
        model.add(offset + z <= arena)
    model.minimize(arena)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def test_small_arenas_are_as_small_as_those_of_cp_sat() -> None:
    for start, end, size in small_instances():
        packing = pack(np.array(start), np.array(end), np.array(size))
        assert packing.arena == min_arena(start, end, size)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_arenas_of_published_schedules_are_the_peak(name: str) -> None:
    schedule = db.schedules[name](devices=4, micro_batches=12)
    costs = StageCosts.of(stages=schedule.stages, activation=12, activation_after_input=4)
    assert all(plan.fragmentation == 0 for plan in plan_addresses(db.simulate(schedule, costs)))


def test_the_same_program_has_the_same_addresses() -> None:
    random = Random(1)
    start = np.sort([random.randrange(60) for _ in range(60)])
    end, size = start + [random.randrange(1, 20) for _ in start], np.array([random.randrange(1, 9) for _ in start])
    first, second = pack(start, end, size), pack(start, end, size)
    assert (first.arena, first.offset.tolist()) == (second.arena, second.offset.tolist())


@given(timelines())
@settings(max_examples=30)
def test_operations_wait_for_previous_owners_of_their_memory(timeline: Timeline) -> None:
    """Waits may be transitive."""
    times = {operation.op: operation for operation in timeline.operations}
    for plan in plan_addresses(timeline):
        waits = plan.waits()
        for op, awaited in waits.items():
            assert all(times[freed_by].end <= times[op].start for freed_by in awaited)
        ended: dict[Op, set[Op]] = {}
        for tensor in plan.tensors:
            before = ended.setdefault(tensor.allocated_by, set())
            for freed_by in waits.get(tensor.allocated_by, ()):
                before |= {
                    freed_by,
                    *(op for t in plan.tensors if t.freed_by == freed_by for op in ended[t.allocated_by]),
                }
            earlier = (t for t in plan.tensors if t.end <= tensor.start)
            assert {t.freed_by for t in earlier if meet(t, tensor)} <= before


def meet(one: PlacedTensor, other: PlacedTensor) -> bool:
    return one.offset < other.offset + other.size and other.offset < one.offset + one.size


def test_sizes_and_offsets_are_multiples_of_the_alignment() -> None:
    timeline = timeline_of("0F0 0F1 0B0 0B1", costs=StageCosts.of(stages=1, activation=Fraction(100, 3)))
    [plan] = plan_addresses(timeline, alignment=16)
    assert [(tensor.size, tensor.offset) for tensor in plan.tensors] == [(48, 0), (48, 48)]
    assert (plan.peak, plan.arena) == (96, 96)
