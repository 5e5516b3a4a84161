"""Schedules of the library, unchanged or with more recomputation or offload than their papers have."""

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import debubble as db
from debubble.ir import Kind, Op, OutOfMemoryError, StageCosts, lower
from debubble.ir.stage_costs import HostLink, Number


def schedule_of(name: Any, *, devices: Any, micro_batches: int = 4) -> Any:
    """A schedule of the library, with at least two chunks per device if their number is free."""
    entry = db.schedules[name]
    chunks = {"chunks": max(entry.default_chunks, 2)} if "chunks" in entry.options else {}
    costs = StageCosts.of(stages=devices * chunks.get("chunks", entry.default_chunks), offload=1)
    return entry(devices=devices, micro_batches=micro_batches, costs=costs, **chunks)


def timeline(
    name: Any,
    p: Any,
    m: Any,
    v: int = 1,
    *,
    transfer: Number | None = None,
    limit: Any = None,
    link: HostLink = "full-duplex",
    **options: Any,
) -> Any:
    """Simulation with F = I = W = 1 per device, where one micro-batch's activation is 1 until W frees it.

    `transfer` is the time to offload or reload, relative to F; None: no offload.
    """
    share = Fraction(1, v)
    costs = StageCosts.of(
        stages=p * v, forward=share, backward_input=share, backward_weight=share, activation=share,
        activation_after_input=share, offload=None if transfer is None else share * transfer, host_link=link,
        memory_limit=limit,
    )  # fmt: skip
    return db.simulate(db.schedules[name](devices=p, micro_batches=m, chunks=v, costs=costs, **options), costs)


def fused(schedule: Any) -> Any:
    """The schedule with recomputation in the backwards of all stages without an R."""
    explicit = {stage for stage, _ in schedule.explicit_recompute}
    return replace(schedule, fused_recompute=schedule.fused_recompute | {*range(schedule.stages)} - explicit)


def recomputing(schedule: Any) -> Any:
    """The schedule if it recomputes anything; else with recomputation in all backwards."""
    return schedule if schedule.fused_recompute or schedule.explicit_recompute else fused(schedule)


def explicit(schedule: Any) -> Any:
    """An R right before every backward that does not recompute yet."""

    def around(op: Any) -> Any:
        if op.kind in (Kind.B, Kind.I) and not schedule.recomputes(op.stage, op.micro_batch):
            return Op(Kind.R, op.stage, op.micro_batch), op
        return (op,)

    return _woven(schedule, around)


def offloading(schedule: Any) -> Any:
    """Offload after the forward of every micro-batch that stays, and reload before its first use."""

    def around(op: Any) -> Any:
        _, stage, j = op
        needs = Op(Kind.R, stage, j) if (stage, j) in schedule.explicit_recompute else schedule.backward_of(stage, j)
        if (stage, j) in schedule.offloaded or op not in (Op(Kind.F, stage, j), needs):
            return (op,)
        return (op, Op(Kind.O, stage, j)) if op.kind is Kind.F else (Op(Kind.L, stage, j), op)

    return _woven(schedule, around)


def on_one_link(schedule: Any) -> Any:
    """Two devices' transfers on one link: the second's offloads come first, and its reload of each micro-batch."""
    out, back = ([[op for op in order if op.kind is kind] for order in schedule.orders] for kind in (Kind.O, Kind.L))
    reloads = [op for pair in zip(*reversed(back), strict=True) for op in pair]
    return replace(schedule, link_orders=((*out[1], *out[0]), tuple(reloads)))


def tightest(schedule: Any, costs: Any) -> Any:
    """These costs under the smallest limit, in full units of memory, that lowering can keep."""
    limited = (replace(costs, memory_limit=(limit,)) for limit in itertools.count(1))
    return next(costs for costs in limited if _fits(schedule, costs))


def _fits(schedule: Any, costs: Any) -> Any:
    try:
        lower(schedule, costs)
    except OutOfMemoryError:
        return False
    return True


def _woven(schedule: Any, around: Any) -> Any:
    """The schedule with some operations inserted before and after others."""
    return replace(schedule, orders=tuple(tuple(o for op in order for o in around(op)) for order in schedule.orders))
