"""SCOPE's decomposition: its bounds are bounds, its answers are answers, and at scale they meet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.costs.units import Strategy, Unit, Units
from debubble.ir import Kind, Schedule
from debubble.papers.scope.program.benders import decompose
from debubble.papers.scope.program.chunk_curves import ChunkCurves
from debubble.papers.scope.program.chunk_times import ChunkDealer
from debubble.papers.scope.program.deals import deal
from debubble.papers.scope.program.ends import ends_of_long_runs
from debubble.papers.scope.program.instance import DeviceInstance, Instance, alive, instance
from debubble.papers.scope.program.layer_types import LayerRun, layer_runs
from debubble.papers.scope.program.per_chunk import per_chunk_reading
from debubble.papers.scope.program.relaxation import Box, LinearRelaxation, relaxed
from debubble.papers.scope.program.subproblem import Open, bound_of_prices, fastest, time_bound
from debubble.schedules import schedules
from debubble.search.effort import Effort


def layer(kind: str, time: int, *, kept: int = 4, static: int = 1) -> Unit:
    return Unit(
        type=kind, layer=None, forward=time, backward_input=time, backward_weight=time, static=static,
        strategies={"none": Strategy(kept), "some": Strategy(kept / 2, time / 4), "full": Strategy(kept / 8, time)},
    )  # fmt: skip


def interleaved(devices: int, chunks: int, micro_batches: int) -> Schedule:
    if chunks == 1:
        return schedules["1f1b"](devices=devices, micro_batches=micro_batches)
    return schedules["interleaved"](devices=devices, chunks=chunks, micro_batches=micro_batches)


def asked(units: Units, *, devices: int, chunks: int, micro_batches: int, limit: float) -> Instance:
    schedule = interleaved(devices, chunks, micro_batches)
    return instance(layer_runs(units), schedule, limits=[limit] * devices, static=0.0)


def small(limit: float = 30, chunks: int = 2) -> Instance:
    units = Units(units=(layer("embedding", 1), *[layer("dense", 3)] * 5, *[layer("moe", 5, kept=6)] * 3))
    return asked(units, devices=2, chunks=chunks, micro_batches=4, limit=limit)


def assignments(
    inst: Instance, device: DeviceInstance, held: Sequence[int], opened: Open
) -> Iterator[tuple[int, set[int]]]:
    """(time, chunks filled) of every way to hold these layers that fits, by enumeration."""
    keys = [[(c, o) for c, here in enumerate(opened) if r in here for o in range(len(inst.times[r]))] for r in range(3)]
    ways = [itertools.combinations_with_replacement(keys[r], n) for r, n in enumerate(held)]
    for choice in itertools.product(*ways):
        chosen = [(c, r, o) for r, layers in enumerate(choice) for c, o in layers]
        restored = max((device.restored[r][o] for _, r, o in chosen), default=0)
        if all(
            sum(row[r][o][c] + device.static[r] for c, r, o in chosen) + restored <= device.room for row in device.kept
        ):
            yield sum(inst.times[r][o] for _, r, o in chosen), {c for c, _, _ in chosen}


OPEN: Open = ((0, 1), (1, 2))
HELD = [(0, 1, 1), (1, 1, 0), (1, 1, 1), (0, 3, 0), (1, 2, 1), (0, 2, 2), (1, 3, 1)]


@cache
def least(limit: float, *, filled: bool) -> dict[tuple[int, ...], int]:
    """By layers held that fit on device 0: the least time there is."""
    inst = small(limit)
    found: dict[tuple[int, ...], int] = {}
    for held in HELD:
        ways = assignments(inst, inst.devices[0], held, OPEN)
        times = [time for time, fills in ways if not filled or fills == {0, 1}]
        if times:
            found[held] = min(times)
    return found


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("limit", [20, 30, 60])
def test_a_device_is_as_fast_as_enumeration_says(limit: float, filled: bool) -> None:
    inst = small(limit)
    known = least(limit, filled=filled)
    for held in HELD:
        answer = fastest(inst, inst.devices[0], held, OPEN, Effort(math.inf), filled=filled)
        assert (answer is None) == (held not in known)
        if answer is not None:
            assert sum(answer.times(inst)) == pytest.approx(known[held], rel=1e-4)
            assert answer.bound <= known[held]


@given(
    memory=st.lists(st.floats(0, 3), min_size=4, max_size=4),
    filling=st.lists(st.floats(0, 2**22), min_size=2, max_size=2),
)
@settings(max_examples=25, deadline=None)
def test_a_cut_bounds_every_assignment_whatever_its_prices(memory: list[float], filling: list[float]) -> None:
    inst = small()
    device = inst.devices[0]
    bound = bound_of_prices(inst, device, OPEN, memory[: len(device.kept)], filling)
    for held, time in least(30, filled=True).items():
        assert bound.at(held) <= time


def test_the_cut_at_a_point_is_no_more_than_an_integer_apart_from_it() -> None:
    inst = small(limit=24)
    held = (1, 3, 0)
    found = time_bound(inst, inst.devices[0], held, OPEN)
    answer = fastest(inst, inst.devices[0], held, OPEN, Effort(math.inf), filled=True)
    assert found is not None
    assert answer is not None
    assert answer.bound - max(inst.times[1]) <= found.at(held) <= answer.bound


@pytest.mark.parametrize(("devices", "chunks", "micro_batches"), [(4, 2, 16), (4, 4, 16), (8, 3, 24)])
@given(weights=st.lists(st.integers(0, 9), min_size=4, max_size=4))
@settings(max_examples=20, deadline=None)
def test_the_combinations_kept_need_as_much_memory_as_all_that_are_reached(
    devices: int, chunks: int, micro_batches: int, weights: list[int]
) -> None:
    schedule = interleaved(devices, chunks, micro_batches)
    for device, kept in enumerate(alive(schedule)):
        most, most_kept = (
            max(sum(n * w for n, w in zip(row, weights, strict=False)) for row in rows)
            for rows in (list(reached(schedule, device)), kept)
        )
        assert most == most_kept


def reached(schedule: Schedule, device: int) -> Iterator[tuple[int, ...]]:
    """The micro-batches alive per chunk of a device after each of its operations."""
    stages = schedule.placement.stages_of[device]
    living = dict.fromkeys(stages, 0)
    for op in schedule.orders[device]:
        living[op.stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(op.kind, 0)
        yield tuple(living[stage] for stage in stages)


@given(limit=st.sampled_from([24, 30, 45, 80]), chunks=st.sampled_from([1, 2]), count=st.integers(3, 4))
@settings(max_examples=5, deadline=None)
def test_bound_and_answer_enclose_the_optimum_of_small_instances(limit: float, chunks: int, count: int) -> None:
    units = Units(units=(layer("embedding", 1), *[layer("dense", 3)] * count, layer("head", 2)))
    inst = asked(units, devices=2, chunks=chunks, micro_batches=4, limit=limit)
    values = list(_values(inst))
    found = decompose(inst, effort=Effort(math.inf), seed=0)
    if not values:
        assert found.layers is None
        return
    assert found.bound <= min(values)
    assert found.layers is None or min(values) <= found.value


def _values(inst: Instance) -> Iterator[float]:
    """The pooled objective of every split, every device at its fastest."""
    return (inst.weight * max(times) + sum(times) for times in _splits(inst))


def _splits(inst: Instance) -> Iterator[list[int]]:
    """The devices' times of every split that fits, each at its fastest."""
    return ([min(map(sum, device)) for device in devices] for devices in _chunk_times(inst))


def _chunk_times(inst: Instance) -> Iterator[list[set[tuple[int, ...]]]]:
    """For every split that fits: per device, the times of its chunks in every way to recompute that fits."""
    total = sum(inst.counts)
    kinds = [r for r, count in enumerate(inst.counts) for _ in range(count)]
    for cuts in itertools.combinations(range(1, total), inst.stages - 1):
        bounds = list(itertools.pairwise((0, *cuts, total)))
        devices = []
        for device in inst.devices:
            here = [kinds[slice(*bounds[s])] for s in device.stages]
            options = [
                _per_chunk(inst, device, c, [chunk.count(r) for r in range(len(inst.counts))])
                for c, chunk in enumerate(here)
            ]
            fitting = {
                tuple(time for time, _, _ in choice)
                for choice in itertools.product(*options)
                if all(
                    sum(rows[j] for _, rows, _ in choice) + max(back for _, _, back in choice) <= device.room
                    for j in range(len(device.kept))
                )
            }
            if not fitting:
                break
            devices.append(fitting)
        else:
            yield devices


def _per_chunk(inst: Instance, device: DeviceInstance, c: int, held: Sequence[int]) -> list[tuple[int, list[int], int]]:
    """(time, bytes per combination alive, bytes brought back) of every way to hold these layers in one chunk."""
    ways = [itertools.combinations_with_replacement(range(len(inst.times[r])), n) for r, n in enumerate(held)]
    found = []
    for choice in itertools.product(*ways):
        chosen = [(r, o) for r, options in enumerate(choice) for o in options]
        rows = [sum(row[r][o][c] + device.static[r] for r, o in chosen) for row in device.kept]
        back = max(device.restored[r][o] for r, o in chosen)
        found.append((sum(inst.times[r][o] for r, o in chosen), rows, back))
    return found


def sixteen(chunks: int) -> Instance:
    """200 layers of up to six types on 16 devices, of which 1F1B without recomputation keeps far too much."""
    tower = [layer("vision", 1, kept=2)] * 30 if chunks == 1 else []
    units = Units(
        units=(
            *tower, layer("embedding", 1), *[layer("dense", 2)] * 3,
            *[layer("moe", 4, kept=5, static=2)] * (194 - len(tower)), layer("mtp", 5), layer("head", 3),
        )
    )  # fmt: skip
    return asked(units, devices=16, chunks=chunks, micro_batches=32, limit=300)


@pytest.mark.parametrize("chunks", [1, 2])
def test_two_hundred_layers_on_sixteen_devices_leave_less_than_one_per_cent(chunks: int) -> None:
    inst = sixteen(chunks)
    found = decompose(inst, effort=Effort(math.inf), seed=0)
    assert found.layers is not None
    assert [sum(map(sum, options)) for options in found.layers] == list(inst.counts)
    assert found.gap < 0.01


def test_bounds_on_devices_times_are_learnt_within_the_effort() -> None:
    spent = Effort(0.002)
    decompose(sixteen(1), effort=spent, seed=0)
    assert spent.spent < 2 * spent.seconds


def test_the_same_seed_gives_the_same_answer() -> None:
    first, second = (decompose(small(), effort=Effort(math.inf), seed=1) for _ in range(2))
    assert first.layers is not None
    assert (first.layers, first.bound) == (second.layers, second.bound)


@pytest.mark.parametrize("limit", [24, 30, 80])
def test_the_per_chunk_answer_is_the_optimum_by_enumeration(limit: float) -> None:
    inst = two_long_runs(limit)
    found = per_chunk_reading(inst, decompose(inst, effort=Effort(math.inf), seed=0), Effort(2))
    assert found.layers is not None
    assert [sum(map(sum, options)) for options in found.layers] == list(inst.counts)
    assert found.bound <= per_chunk_optimum(inst) == found.value


def per_chunk_optimum(inst: Instance) -> int:
    optimum: int = min(
        inst.weight * sum(map(max, zip(*choice, strict=True))) + sum(map(sum, choice))
        for devices in _chunk_times(inst)
        for choice in itertools.product(*devices)
    )
    return optimum


@pytest.mark.parametrize("limit", [24, 30, 80])
def test_layers_are_dealt_within_all_times_of_chunks_that_some_assignment_keeps(limit: float) -> None:
    inst = two_long_runs(limit)
    dealer = ChunkDealer(inst, Effort(math.inf), 1.0 * inst.most)
    kept = {
        tuple(map(max, zip(*choice, strict=True)))
        for devices in _chunk_times(inst)
        for choice in itertools.product(*devices)
    }
    shortest = [times for times in kept if not any(_within(other, times) for other in kept - {times})]
    assert len(shortest) > 1
    for times in shortest:
        assert any(dealer.loads(times, ends) for ends in ends_of_long_runs(inst))


def test_without_a_limit_of_memory_layers_are_dealt_within_times_that_hold_them_without_recomputation() -> None:
    inst = two_long_runs(math.inf)
    dealer = ChunkDealer(inst, Effort(math.inf), 1.0 * inst.most)
    kept = min((tuple(map(max, zip(*map(min, devices), strict=True))) for devices in _chunk_times(inst)), key=sum)
    every = ends_of_long_runs(inst)
    assert any(dealer.loads(kept, ends) for ends in every)
    assert any(dealer.loads(kept, ends, sum(kept) - 1) for ends in every)
    assert not any(dealer.loads((inst.shortest[0], inst.shortest[0]), ends) for ends in every)


def test_layers_are_not_dealt_within_times_of_chunks_that_no_assignment_keeps() -> None:
    inst = two_long_runs(24)
    dealer = ChunkDealer(inst, Effort(math.inf), 1.0 * inst.most)
    members = [member for ends in ends_of_long_runs(inst) for member in ends.members or (ends,)]
    kept = {
        tuple(map(max, zip(*choice, strict=True)))
        for devices in _chunk_times(inst)
        for choice in itertools.product(*devices)
    }
    layer = min(inst.times[0])
    for first, second in itertools.product(range(2, 20, 4), repeat=2):
        times = (first * layer, second * layer)
        # Times are rounded by less than 0.1%.
        if not any(_within(each, tuple(math.ceil(1.001 * time) for time in times)) for each in kept):
            assert not any(dealer.loads(times, member) for member in members)


def test_layers_keep_as_little_as_they_can_only_in_all_but_a_thousandth_of_their_time() -> None:
    inst = asked(Units(units=halves() * 9), devices=2, chunks=2, micro_batches=4, limit=60)
    curve = ChunkCurves(inst, Effort(math.inf), 1.0 * inst.most).of((0,), (math.inf,), 1.0 * inst.most)
    for time, size in zip(inst.times[0], inst.activations[0], strict=True):
        assert curve.within(5 * time)[0][0, 5] == 5 * size
        assert curve.within(math.floor(0.999 * 5 * time))[0][0, 5] > 5 * size


def test_the_parts_of_some_ends_have_all_of_their_choices_between_them() -> None:
    several = [ends for ends in ends_of_long_runs(two_long_runs(24)) if ends.members]
    assert several
    for ends in several:
        members = [member for part in ends.parts for member in part.members or (part,)]
        assert len(members) == len(ends.members)
        assert {member.spans for member in members} == {member.spans for member in ends.members}


def within_all(devices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], int]:
    """Times of the chunks that no device exceeds, all a third longer, and the longest sum of a device's own."""
    return tuple(4 * max(times) // 3 for times in zip(*devices, strict=True)), max(map(sum, devices))


@pytest.mark.parametrize("limit", [24, 30, 80])
def test_layers_are_dealt_within_every_sum_of_times_that_some_assignment_keeps(limit: float) -> None:
    inst = two_long_runs(limit)
    dealer = ChunkDealer(inst, Effort(math.inf), 2.0 * inst.most)
    kept = {within_all(choice) for devices in _chunk_times(inst) for choice in itertools.product(*map(sorted, devices))}
    for times, total in sorted(kept, key=lambda pair: pair[1])[:40]:
        assert total < sum(times)
        assert any(dealer.loads(times, ends, total) for ends in ends_of_long_runs(inst))


def test_layers_are_not_dealt_within_a_sum_of_times_too_short_for_them() -> None:
    inst = two_long_runs(24)
    dealer = ChunkDealer(inst, Effort(math.inf), 2.0 * inst.most)
    kept = [within_all(choice) for devices in _chunk_times(inst) for choice in itertools.product(*map(sorted, devices))]
    times, total = min(kept, key=lambda pair: pair[1])
    members = [member for ends in ends_of_long_runs(inst) for member in ends.members or (ends,)]
    assert any(dealer.loads(times, member) for member in members)
    assert not any(dealer.loads(times, member, 3 * total // 4) for member in members)


@pytest.mark.parametrize("limit", [24, 30, 80])
def test_the_times_of_chunks_of_good_answers_lie_in_the_ranges_of_the_relaxation(limit: float) -> None:
    inst = two_long_runs(limit)
    goal = per_chunk_optimum(inst)
    every = Box((0,) * inst.chunks, (inst.most,) * inst.chunks, inst.most)
    programs = [
        LinearRelaxation(inst, Effort(math.inf), ends.opened(inst), per_chunk=True) for ends in ends_of_long_runs(inst)
    ]
    boxes = [box for program in programs if (box := program.ranges(every, goal)) is not None]
    best = [
        tuple(map(max, zip(*choice, strict=True)))
        for devices in _chunk_times(inst)
        for choice in itertools.product(*devices)
        if inst.weight * sum(map(max, zip(*choice, strict=True))) + sum(map(sum, choice)) == goal
    ]
    assert best
    for times in best:
        assert any(_within(box.low, times) and _within(times, box.high) and sum(times) <= box.total for box in boxes)
    assert all(sum(box.low) > 0 and sum(box.high) < inst.chunks * inst.most for box in boxes)


@given(
    low=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    widths=st.lists(st.integers(4, 9), min_size=2, max_size=2),
    left=st.integers(4, 18),
    step=st.integers(1, 5),
    share=st.sampled_from([0.25, 1.0]),
)
@settings(max_examples=50, deadline=None)
def test_a_divided_box_holds_in_its_two_parts_all_times_that_it_held(
    low: list[int], widths: list[int], left: int, step: int, share: float
) -> None:
    high = [a + b for a, b in zip(low, widths, strict=True)]
    box = Box((low[0], low[1]), (high[0], high[1]), sum(low) + left).clipped()
    parts = box.divided(2, [[(step, share)], []])
    assert held_by(box) == held_by(parts[0]) | held_by(parts[1])
    assert all(part.size < box.size for part in parts)


def held_by(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(a, b + 1) for a, b in zip(box.low, box.high, strict=True))
    return {times for times in itertools.product(*ranges) if sum(times) <= box.total}


def test_a_box_is_divided_where_one_more_layer_fits_on_every_device() -> None:
    longer, shorter = Box((10, 10), (40, 45), 85).divided(1, [[(12, 1.0)], []])
    assert (longer.low, shorter.high) == ((24, 10), (23, 45))


def test_a_box_is_halved_where_one_more_layer_fits_on_few_devices() -> None:
    longer, shorter = Box((10, 10), (40, 46), 86).divided(1, [[(12, 1 / 16)], []])
    assert (longer.low, shorter.high) == ((10, 28), (40, 28))


def _within(some: Sequence[int], others: Sequence[int]) -> bool:
    return all(a <= b for a, b in zip(some, others, strict=True))


def test_the_per_chunk_bound_sees_that_chunks_do_not_make_up_for_each_other() -> None:
    inst = two_long_runs(24)
    pooled = decompose(inst, effort=Effort(math.inf), seed=0)
    found = per_chunk_reading(inst, pooled, Effort(2))
    assert min(_values(inst)) < found.bound <= per_chunk_optimum(inst)


def halves() -> tuple[Unit, Unit]:
    """Attention and MLP with strategies of their own; recomputed whole, both need one input only."""
    attention = Unit(
        type="attention", layer=None, forward=2, backward_input=2, backward_weight=2, static=1,
        strategies={"none": Strategy(8), "norm": Strategy(6, 0.5), "full": Strategy(2, 2)},
    )  # fmt: skip
    mlp = Unit(
        type="mlp", layer=None, forward=4, backward_input=4, backward_weight=4, static=1,
        strategies={
            "none": Strategy(12), "act": Strategy(5, 0.25), "full": Strategy(2, 4, after_full=0)
        },
    )  # fmt: skip
    return attention, mlp


def one_run(strategies: Sequence[str] | None) -> LayerRun:
    (run,) = layer_runs(Units(units=halves() * 3), strategies)
    return run


def test_a_layer_has_every_efficient_combination_of_its_units_strategies() -> None:
    found = {option.strategies: (option.time, option.activation) for option in one_run(None).options}
    assert found == {
        ("none", "none"): (18.0, 20.0),
        ("none", "act"): (18.25, 13.0),
        ("norm", "act"): (18.75, 11.0),
        ("full", "act"): (20.25, 7.0),
        ("full", "full"): (24.0, 2.0),
    }


def test_dual_recomputes_whole_layers_or_nothing() -> None:
    assert [option.strategies for option in one_run(("full",)).options] == [("none", "none"), ("full", "full")]


@pytest.mark.parametrize("limit", [24, 30, 45, 80])
def test_the_relaxation_bounds_the_optimum_of_small_instances(limit: float) -> None:
    units = Units(units=(layer("embedding", 1), *[layer("dense", 3)] * 4, layer("head", 2)))
    inst = asked(units, devices=2, chunks=2, micro_batches=4, limit=limit)
    found = relaxed(inst, Effort(math.inf))
    optimum = min(_values(inst), default=math.inf)
    assert found is None or found.bound <= optimum
    assert found is not None or optimum == math.inf


@pytest.mark.parametrize("limit", [24, 30, 45, 80])
def test_the_relaxations_with_given_ends_bound_the_per_chunk_optimum_between_them(limit: float) -> None:
    inst = two_long_runs(limit)
    every = [relaxed(inst, Effort(math.inf), opened=e.opened(inst), per_chunk=True) for e in ends_of_long_runs(inst)]
    assert min(found.bound for found in every if found is not None) <= per_chunk_optimum(inst)


def test_a_tower_behind_which_chunks_are_of_different_lengths_leaves_less_than_one_per_cent_per_chunk() -> None:
    units = Units(
        units=(
            *[layer("vision", 1, kept=2)] * 40, layer("embedding", 1), *[layer("dense", 2)] * 3,
            *[layer("moe", 4, kept=5, static=2)] * 60, layer("head", 3),
        )
    )  # fmt: skip
    inst = asked(units, devices=8, chunks=2, micro_batches=32, limit=280)
    effort = Effort(8)
    found = per_chunk_reading(inst, decompose(inst, effort=effort.part(4), seed=0), effort)
    assert found.layers is not None
    assert found.gap < 0.01


def two_long_runs(limit: float) -> Instance:
    units = Units(units=(*[layer("vision", 1, kept=3)] * 4, layer("embedding", 1), *[layer("dense", 3)] * 4))
    return asked(units, devices=2, chunks=2, micro_batches=4, limit=limit)


@pytest.mark.parametrize("limit", [24, 30, 45, 80])
def test_layers_are_dealt_in_the_least_time_and_the_bound_is_none_above_it(limit: float) -> None:
    inst = two_long_runs(limit)
    optimum = min(max(times) for times in _splits(inst))
    least, dealt = deal(inst, Effort(math.inf), least=1.0, most=2.0 * inst.most)
    assert dealt is not None
    assert least <= optimum <= max(sum(piece.times(inst)) for piece in dealt.pieces) <= optimum * (1 + 2e-3)
    assert optimum <= least * (1 + 2e-3)


@pytest.mark.parametrize("limit", [24, 30, 45, 80])
def test_what_is_dealt_holds_every_layer_in_order_and_fills_every_stage(limit: float) -> None:
    inst = two_long_runs(limit)
    _, dealt = deal(inst, Effort(math.inf), least=1.0, most=2.0 * inst.most)
    assert dealt is not None
    held: list[list[int]] = [[] for _ in range(inst.stages)]
    for device, piece in zip(inst.devices, dealt.pieces, strict=True):
        for (chunk, run, _), number in piece.layers.items():
            held[device.stages[chunk]] += [run] * number
    assert all(held)
    in_order = [run for stage in held for run in sorted(stage)]
    assert in_order == [run for run, count in enumerate(inst.counts) for _ in range(count)]


def test_dealing_without_effort_keeps_the_answer_that_it_starts_from() -> None:
    inst = two_long_runs(24)
    _, first = deal(inst, Effort(math.inf), least=1.0, most=2.0 * inst.most)
    assert first is not None
    slowest = max(sum(piece.times(inst)) for piece in first.pieces)
    assert deal(inst, Effort(0.0), least=1.0, most=slowest, start=first) == (1.0, first)


def test_too_little_memory_for_any_deal_has_no_answer() -> None:
    inst = two_long_runs(8)
    assert list(_splits(inst)) == []
    assert deal(inst, Effort(math.inf), least=1.0, most=2.0 * inst.most)[1] is None


def test_runs_too_many_to_deal_are_left_to_the_master() -> None:
    units = Units(units=tuple(layer(f"kind {k}", 1 + k) for k in range(12) for _ in range(3)))
    inst = asked(units, devices=2, chunks=2, micro_batches=4, limit=60)
    assert deal(inst, Effort(math.inf), least=5.0, most=math.inf) == (5.0, None)


def test_a_tower_and_two_chunks_leave_less_than_one_per_cent() -> None:
    units = Units(
        units=(
            *[layer("vision", 1, kept=2)] * 40, layer("embedding", 1), *[layer("dense", 2)] * 3,
            *[layer("moe", 4, kept=5, static=2)] * 60, layer("head", 3),
        )
    )  # fmt: skip
    inst = asked(units, devices=8, chunks=2, micro_batches=32, limit=280)
    found = decompose(inst, effort=Effort(10), seed=0)
    assert found.layers is not None
    assert [sum(map(sum, options)) for options in found.layers] == list(inst.counts)
    assert found.gap < 0.01
