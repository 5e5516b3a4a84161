"""Chronos-Pipe, Chronos-Recomp and the ZeRO-2 variant: schedules with 1F1B's step time and short activation lifespans.

Source: Lin et al., Enhancing Memory Efficiency in LLM Training Through Chronos-aware Pipeline Parallelism, sections
4.1 (Chronos-Pipe), 4.2 (Chronos-Recomp) and 4.3 (ZeRO-2).  The paper numbers chunks from 1, we from 0.  Its T_unit is
our f and 2 T_unit our b, of one chunk on one device; its m_a is the activations of all p v chunks; its P is our p.

Chronos-Pipe takes v (f + b) (m + p - 1), as 1F1B does, and stage s stores (v + 1) / (2 v) of m_a for large p, less s
blocks.

Chronos-Recomp inserts an R of length rho f before every backward of the shallow chunks; R does not wait for the
gradient.  The last chunk may then start k rounds later (`delay_rounds`, Appendix A), which costs no time.

The ZeRO-2 variant launches each chunk for g micro-batches in a row, with forwards and backwards still alternating, and
reduces a chunk's gradients once per group.  Its bubble is the registered formula, except that p = 7, g = 4 and a few
settings with g = 3, 5, 6 take up to 2 b more.

`split_backward`, which the paper does not have, splits every backward into I and W: the gradient is sent after I, so
the cool-down is shorter.  Nothing lives longer than with a fused backward.

The timetable is computed for the mean times of all stages.  Only its order is used: with the stages' actual times each
operation starts as soon as it can.  Among the timetables of equal peak memory none was faster for uneven stages (30%
spread, p = 4 and 8, v = 2 to 4).  Errors and gaps of the paper are listed in docs/notes/chronospipe.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from types import MappingProxyType

from debubble.ir import InputError, Kind, Number, Op, Placement, Schedule, StageCosts
from debubble.ir.stage_costs import PerStage
from debubble.papers.chronospipe.timetable import Timetable, TimetableSpec, timetables
from debubble.schedules.registry import schedule

PAPER = "ChronosPipe"
Shares = Mapping[int, Number]
"""Chunk -> rho, the fraction of it that recomputes."""


@schedule(
    "chronos",
    paper=f"{PAPER}, section 4.1",
    bubble="(p - 1)(f + b)",
    memory="(p + 1 + ceil((p - 3) / 6) + ceil((2 p - 3) / 6)) / 2 for v = 2 and b = 2 f",
    default_chunks=2,
)
def chronos(
    *, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None, split_backward: bool = False
) -> Schedule:
    """Chronos-Pipe: dependent operations follow each other at once; only between chunks may there be an interval.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Times and bytes per stage; all times 1 by default.
        split_backward: Whether I and W stand in the place of every backward.
    """
    base = periodic("chronos", devices, micro_batches, chunks, costs=costs)
    return base.with_split_backwards() if split_backward else base


@schedule(
    "chronos-recomp",
    paper=f"{PAPER}, section 4.2",
    bubble="(p - 1)(f + b) and less, besides what is recomputed",
    memory="ceil(p / 2) / 2, and the block that is recomputed, for v = 2 and b = 2 f",
    default_chunks=2,
)
def chronos_recomp(
    *,
    devices: int,
    micro_batches: int,
    chunks: int = 2,
    costs: StageCosts | None = None,
    rho: Number = 1,
    recomputed_chunks: int | Collection[int] = 1,
    split_backward: bool = False,
) -> Schedule:
    """Chronos-Recomp: the shallow chunks recompute a share rho, right before their backward and without waiting.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Times and bytes per stage; all times 1 by default.
        rho: Share of a chunk's activations that is recomputed.
        recomputed_chunks: The number of chunks that recompute, counted from the first, or which ones.
        split_backward: Whether I and W stand in the place of every backward.
    """
    shares = _shares(recomputed_chunks, chunks, rho)
    base = periodic("chronos-recomp", devices, micro_batches, chunks, costs=costs, recompute=shares)
    return base.with_split_backwards() if split_backward else base


@schedule(
    "chronos-zero2",
    paper=f"{PAPER}, section 4.3",
    bubble="(p - 1)(f + b) - (v - 1)(min(g, p) - 1)(f + b) / v",
    memory="p + g + g ceil((p - 3 g) / 6 g) + g ceil((2 p - 3 g) / 6 g), halved, for v = 2 and b = 2 f",
    default_chunks=2,
)
def chronos_zero2(
    *,
    devices: int,
    micro_batches: int,
    chunks: int = 2,
    costs: StageCosts | None = None,
    group: int = 2,
    rho: Number = 1,
    recomputed_chunks: int | Collection[int] = 0,
    split_backward: bool = False,
) -> Schedule:
    """Chronos-Pipe in groups of g micro-batches: gradients are reduced once per chunk and group, next to the compute.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Times and bytes per stage; all times 1 by default.
        group: Micro-batches of a group, g.
        rho: Share of a chunk's activations that is recomputed.
        recomputed_chunks: The number of chunks that recompute, counted from the first, or which ones.
        split_backward: Whether I and W stand in the place of every backward.
    """
    shares = _shares(recomputed_chunks, chunks, rho)
    base = periodic("chronos-zero2", devices, micro_batches, chunks, costs=costs, recompute=shares, group=group)
    reduced = reduce_gradients(base, group=group)
    return reduced.with_split_backwards() if split_backward else reduced


def periodic(
    name: str,
    devices: int,
    micro_batches: int,
    chunks: int,
    *,
    costs: StageCosts | None = None,
    recompute: Mapping[int, Number] | None = None,
    group: int = 1,
) -> Schedule:
    """The schedule of the timetable with the lowest peak memory; `recompute` maps a chunk to its rho."""
    for noun, number in (("chunk", chunks), ("micro-batch per group", group)):
        if number < 1:
            raise InputError(f"Chronos-Pipe needs at least one {noun}, not {number}.")
    costs = costs or StageCosts.of(stages=devices * chunks)
    shares = {chunk: share for chunk, share in (recompute or {}).items() if share}
    spec = timetable_spec(costs, devices=devices, chunks=chunks, shares=shares, group=group)
    return follow_timetable(name, _min_memory_timetable(spec, micro_batches, costs, shares), micro_batches, shares)


def follow_timetable(
    name: str, timetable: Timetable, micro_batches: int, shares: Shares = MappingProxyType({})
) -> Schedule:
    """The schedule that follows a timetable's order."""
    devices, chunks = timetable.spec.devices, timetable.spec.chunks
    return Schedule(
        name=name,
        placement=Placement.looped(devices, chunks),
        micro_batches=micro_batches,
        orders=tuple(
            tuple(Op(kind, chunk * devices + d, j) for _, kind, chunk, j in timetable.operations(d, micro_batches))
            for d in range(devices)
        ),
        # There may be an interval between chunks, at whose end a blocking message would have to wait.
        asynchronous=frozenset(range(devices - 1, devices * chunks - 1, devices)),
        recompute_fraction={
            chunk * devices + d: share for chunk, share in shares.items() if share != 1 for d in range(devices)
        },
    )


def timetable_spec(costs: StageCosts, *, devices: int, chunks: int, shares: Shares, group: int = 1) -> TimetableSpec:
    """The stages' mean times as small integers, with ratios accurate to a thousandth of f + b."""
    forward, backward = _mean(costs.forward), _mean(costs.backward_input) + _mean(costs.backward_weight)
    slot = forward + backward or 1

    def quantized(time: Fraction) -> Fraction:
        # The order follows start times, so dependent operations need positive durations.
        return max(Fraction(1, 1000), (time / slot).limit_denominator(1000))

    f = min(quantized(forward), Fraction(999, 1000))
    recompute = [
        quantized(_mean(costs.recompute[c * devices : (c + 1) * devices]) * Fraction(shares[c])) if c in shares else 0
        for c in range(chunks)
    ]
    unit = math.lcm(f.denominator, *(Fraction(r).denominator for r in recompute))
    return TimetableSpec(
        devices=devices,
        group=group,
        forward=int(f * unit),
        backward=int((1 - f) * unit),
        recompute=tuple(int(r * unit) for r in recompute),
    )


def reduce_gradients(base: Schedule, *, group: int) -> Schedule:
    """Add G after the last backward of every (stage, group of micro-batches)."""
    ends = {*range(group - 1, base.micro_batches, group), base.micro_batches - 1}
    return base.replacing(
        lambda op: [op, op._replace(kind=Kind.G)] if op.kind is Kind.B and op.micro_batch in ends else [op]
    )


def delay_rounds(devices: int) -> int:
    """K of equation (8), v = 2, b = 2 f: rounds by which full recomputation of chunk 0 delays chunk 1's forwards."""
    p = devices
    interval = 3 + 6 * _ceil(p - 3, 6) - p
    longer = _ceil(p - 1, 2) - _ceil(p - 3, 6) - 1
    return max(0, _ceil(longer - interval, 7))


def _min_memory_timetable(spec: TimetableSpec, micro_batches: int, costs: StageCosts, shares: Shares) -> Timetable:
    """The timetable with the lowest peak on device 0, where the peak is largest; ties go to the shortest lifespan."""
    p = spec.devices
    full = [float(_mean(costs.activation[c * p : (c + 1) * p])) for c in range(spec.chunks)]
    recomputed = [float(_mean(costs.activation_recomputed[c * p : (c + 1) * p])) for c in range(spec.chunks)]
    stored = [a - (a - r) * float(shares.get(c, 0)) for c, (a, r) in enumerate(zip(full, recomputed, strict=True))]
    total = sum(full) or 1.0

    def peak_and_span(timetable: Timetable) -> tuple[float, int]:
        span = timetable.backward_start(0, 0, 0) - timetable.forward_start(0, 0, 0)
        short = min(micro_batches, spec.group * (span // timetable.period + 3))
        alive = peak = 0.0
        for _, kind, chunk, _ in timetable.operations(0, short):
            if kind is Kind.F:
                alive += stored[chunk]
            elif kind is Kind.R:
                alive += full[chunk] - stored[chunk]
            peak = max(peak, alive)
            if kind is Kind.B:
                alive -= full[chunk]
        # Rounded, so that equal peaks count as equal.
        return round(peak / total, 6), span

    return min(timetables(spec), key=peak_and_span)


def _shares(recomputed_chunks: int | Collection[int], chunks: int, rho: Number) -> dict[int, Number]:
    if not 0 < rho <= 1:
        raise InputError(f"rho is the share of a chunk that recomputes: above 0 and at most 1, not {rho}.")
    chosen = range(recomputed_chunks) if isinstance(recomputed_chunks, int) else recomputed_chunks
    if not set(chosen) <= set(range(chunks)):
        raise InputError(f"recomputed_chunks is {recomputed_chunks}, but there are only {chunks} chunks.")
    return dict.fromkeys(chosen, rho)


def _mean(values: PerStage) -> Fraction:
    return sum((Fraction(value) for value in values), Fraction(0)) / len(values)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
