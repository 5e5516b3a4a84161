import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Kind, Schedule
from debubble.papers.scope.decomposition import decompose
from debubble.papers.scope.instance import DeviceInstance, Instance, in_flight_rows, instance, layer_types
from debubble.papers.scope.relaxation import relaxed
from debubble.schedules import schedules
from debubble.search.effort import Effort


def layer(kind: str, time: int, *, size: int = 4, static: int = 1) -> Unit:
    return Unit(
        type=kind, layer=None, forward=time, backward_input=time, backward_weight=time, static=static,
        strategies={"none": Strategy(size), "some": Strategy(size / 2, time / 4), "full": Strategy(size / 8, time)},
    )  # fmt: skip


def interleaved(devices: int, chunks: int, micro_batches: int) -> Schedule:
    if chunks == 1:
        return schedules["1f1b"](devices=devices, micro_batches=micro_batches)
    return schedules["interleaved"](devices=devices, chunks=chunks, micro_batches=micro_batches)


def asked(units: Units, *, devices: int, chunks: int, micro_batches: int, limit: float) -> Instance:
    schedule = interleaved(devices, chunks, micro_batches)
    return instance(layer_types(units), schedule, limits=[limit] * devices, static=0.0)


@given(weights=st.lists(st.integers(0, 9), min_size=4, max_size=4))
@settings(max_examples=20)
def test_extreme_combinations_have_the_peak_of_all(weights: list[int]) -> None:
    schedule = interleaved(4, 4, 16)
    for device, extremes in enumerate(in_flight_rows(schedule)):
        peak, extreme_peak = (
            max(sum(n * w for n, w in zip(row, weights, strict=False)) for row in rows)
            for rows in (list(reached(schedule, device)), extremes)
        )
        assert peak == extreme_peak


def reached(schedule: Schedule, device: int) -> Iterator[tuple[int, ...]]:
    """The micro-batches in flight per chunk of a device after each of its operations."""
    stages = schedule.placement.stages_of[device]
    in_flight = dict.fromkeys(stages, 0)
    for op in schedule.orders[device]:
        in_flight[op.stage] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(op.kind, 0)
        yield tuple(in_flight[stage] for stage in stages)


def optimum(inst: Instance) -> float:
    """The minimum objective over all splits, with the fastest recomputation per device; infinite if none fits."""
    times = ([min(map(sum, device)) for device in devices] for devices in _chunk_times(inst))
    return min((inst.weight * max(seconds) + sum(seconds) for seconds in times), default=math.inf)


def _chunk_times(inst: Instance) -> Iterator[list[set[tuple[int, ...]]]]:
    """For every split that fits, the times of the chunks of each device, for every recomputation that fits."""
    total = sum(inst.counts)
    kinds = [r for r, count in enumerate(inst.counts) for _ in range(count)]
    for cuts in itertools.combinations(range(1, total), inst.stages - 1):
        bounds = list(itertools.pairwise((0, *cuts, total)))
        devices = []
        for device in inst.devices:
            local = [kinds[slice(*bounds[s])] for s in device.stages]
            options = [
                _per_chunk(inst, device, c, [chunk.count(r) for r in range(len(inst.counts))])
                for c, chunk in enumerate(local)
            ]
            fitting = {
                tuple(time for time, _, _ in choice)
                for choice in itertools.product(*options)
                if all(
                    sum(rows[j] for _, rows, _ in choice) + max(extra for _, _, extra in choice) <= device.capacity
                    for j in range(len(device.alive_bytes))
                )
            }
            if not fitting:
                break
            devices.append(fitting)
        else:
            yield devices


def _per_chunk(
    inst: Instance, device: DeviceInstance, c: int, counts: Sequence[int]
) -> list[tuple[int, list[int], int]]:
    """(time, bytes per combination in flight, restored bytes) of every recomputation of these layers in one chunk."""
    combinations = [itertools.combinations_with_replacement(range(len(inst.times[r])), n) for r, n in enumerate(counts)]
    results = []
    for choice in itertools.product(*combinations):
        chosen = [(r, o) for r, options in enumerate(choice) for o in options]
        rows = [sum(row[r][o][c] + device.static[r] for r, o in chosen) for row in device.alive_bytes]
        restored = max(device.restored[r][o] for r, o in chosen)
        results.append((sum(inst.times[r][o] for r, o in chosen), rows, restored))
    return results


def few_layers(limit: float, chunks: int, count: int) -> Instance:
    units = Units(units=(layer("embedding", 1), *[layer("dense", 3)] * count, layer("head", 2)))
    return asked(units, devices=2, chunks=chunks, micro_batches=4, limit=limit)


def two_long_runs(limit: float) -> Instance:
    units = Units(units=(*[layer("vision", 1, size=3)] * 4, layer("embedding", 1), *[layer("dense", 3)] * 4))
    return asked(units, devices=2, chunks=2, micro_batches=4, limit=limit)


SMALL = [
    *(few_layers(limit, chunks, count) for limit, chunks, count in ((24, 1, 3), (30, 2, 4), (80, 1, 4))),
    *(two_long_runs(limit) for limit in (24, 45)),
]


@pytest.mark.parametrize("inst", SMALL, ids=range(len(SMALL)))
def test_bounds_and_assignments_bracket_the_optimum(inst: Instance) -> None:
    result, lower, best = decompose(inst, Effort(math.inf)), relaxed(inst, Effort(math.inf)), optimum(inst)
    assert best == math.inf if lower is None else lower.bound <= best
    assert result.bound <= best <= result.value
    assert (result.layers is None) == math.isinf(result.value)


def test_too_little_memory_has_no_assignment() -> None:
    assert decompose(two_long_runs(8), Effort(math.inf)).layers is None


def sixteen(chunks: int) -> Instance:
    """200 layers of up to six types on 16 devices, too large for 1F1B without recomputation."""
    tower = [layer("vision", 1, size=2)] * 30 if chunks == 1 else []
    units = Units(
        units=(
            *tower, layer("embedding", 1), *[layer("dense", 2)] * 3,
            *[layer("moe", 4, size=5, static=2)] * (194 - len(tower)), layer("mtp", 5), layer("head", 3),
        )
    )  # fmt: skip
    return asked(units, devices=16, chunks=chunks, micro_batches=32, limit=300)


@pytest.mark.parametrize("chunks", [1, 2])
def test_two_hundred_layers_are_decomposed_on_16_devices(chunks: int) -> None:
    inst = sixteen(chunks)
    result = decompose(inst, Effort(math.inf))
    assert result.layers is not None
    assert [sum(map(sum, options)) for options in result.layers] == list(inst.counts)
    assert result.gap < 0.06


def test_a_decomposition_respects_its_effort() -> None:
    spent = Effort(0.05)
    decompose(sixteen(1), spent)
    assert spent.spent < 4 * spent.seconds


def test_an_assignment_keeps_the_order_and_has_no_empty_stage() -> None:
    inst = two_long_runs(30)
    result = decompose(inst, Effort(math.inf))
    assert result.layers is not None
    stages = [
        [r for r, options in enumerate(result.layers) for option in options for _ in range(option[s])]
        for s in range(inst.stages)
    ]
    assert all(stages)
    assert [run for stage in stages for run in sorted(stage)] == [
        run for run, count in enumerate(inst.counts) for _ in range(count)
    ]


def halves() -> tuple[Unit, Unit]:
    """Attention and MLP with different strategies; if both recompute in full, they save one input."""
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


def test_a_layer_has_every_efficient_combination_of_strategies() -> None:
    (run,) = layer_types(Units(units=halves() * 3))
    options = {option.strategies: (option.time, option.activation) for option in run.options}
    assert options == {
        ("none", "none"): (18.0, 20.0),
        ("none", "act"): (18.25, 13.0),
        ("norm", "act"): (18.75, 11.0),
        ("full", "act"): (20.25, 7.0),
        ("full", "full"): (24.0, 2.0),
    }
