"""Orders of operations that a framework runs: its own, or any that it is given."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from debubble.ir import Kind, Op, Placement, Schedule
from debubble.schedules import schedules

COMBINED = "interleaved-combined"
"""The schedule whose forwards run next to backwards, so that tokens travel meanwhile, where runs ask for that."""
COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class OwnOrders:
    """The framework makes its order itself, which is that of one of these schedules of the library."""

    names: tuple[str, ...]

    def refusal(self, schedule: Schedule) -> str | None:
        """Say what the framework runs instead of an order of F, B, I and W; None if it runs this one."""
        if own_order(schedule, self.names) is not None:
            return None
        uneven = schedule.placement.chunks > 1 and schedule.micro_batches % schedule.devices
        condition = f", with chunks only for multiples of {schedule.devices} micro-batches" if uneven else ""
        return f"runs its own {' or '.join(self.names)} order{condition}"

    def as_run(self, schedule: Schedule, recomputing: Collection[int]) -> Schedule:
        """The schedule as it is: these orders split no backward of a stage that recomputes."""
        return schedule


@dataclass(frozen=True)
class GivenOrders:
    """The framework takes any order of F, B, I and W on stages that lie in one of these ways."""

    placements: frozenset[str] | None = None
    """Placements among `linear`, `looped` and `v_shape` (two stages per device); None: any."""

    def refusal(self, schedule: Schedule) -> str | None:
        """Say how the framework places stages instead; None if it can place them so."""
        if self.placements is None or placement_kind(schedule.placement) in self.placements:
            return None
        return "places stages in a loop, or in a V of two per device"

    def as_run(self, schedule: Schedule, recomputing: Collection[int]) -> Schedule:
        """The schedule without I and W on the stages that recompute (see `whole_backwards`)."""
        return whole_backwards(schedule, recomputing)


Orders = OwnOrders | GivenOrders


def own_order(schedule: Schedule, names: Collection[str]) -> str | None:
    """The first of these schedules of the library that has this very order; None if none has."""
    placement = schedule.placement
    chunks = placement.chunks
    for name in names:
        entry = schedules[name]
        if (chunks > 1) != (entry.default_chunks > 1) or schedule.stages != chunks * schedule.devices:
            continue
        if chunks > 1 and schedule.micro_batches % schedule.devices:
            continue
        built = entry(
            devices=schedule.devices, micro_batches=schedule.micro_batches, chunks=chunks if chunks > 1 else None
        )
        if built.placement == placement and built.orders == schedule.orders:
            return name
    return None


def placement_kind(placement: Placement) -> str | None:
    """`linear`, `looped` or `v_shape`; None for any other placement."""
    devices, chunks = placement.devices, placement.chunks
    if placement == Placement.linear(devices):
        return "linear"
    if placement == Placement.looped(devices, chunks):
        return "looped"
    return "v_shape" if chunks == 2 and placement == Placement.v_shape(devices) else None


def accumulated(schedule: Schedule) -> Schedule:
    """A schedule of one device that accumulates gradients as frameworks do without a pipeline.

    One micro-batch runs after the other, each through the whole model forwards and backwards.
    """
    return replace(schedule, name="1f1b", orders=_accumulation(schedule.stages, schedule.micro_batches))


def undivided(schedule: Schedule) -> Schedule:
    """The schedule of one device that accumulates gradients as one of a single stage; any other as it is.

    Frameworks gather what ZeRO-3 divides unit by unit, and need no stages for that.
    """
    if schedule.devices > 1 or schedule.stages == 1 or schedule.orders != accumulated(schedule).orders:
        return schedule
    fused = frozenset({0}) if schedule.fused_recompute else frozenset()
    order = _accumulation(1, schedule.micro_batches)
    return replace(schedule, placement=Placement.linear(1), orders=order, fused_recompute=fused)


def _accumulation(stages: int, micro_batches: int) -> tuple[tuple[Op, ...]]:
    """The order of accumulating gradients on one device."""
    there, back = range(stages), reversed(range(stages))
    passes = [*((Kind.F, stage) for stage in there), *((Kind.B, stage) for stage in back)]
    return (tuple(Op(kind, stage, j) for j in range(micro_batches) for kind, stage in passes),)


def without_transfers(schedule: Schedule) -> Schedule:
    """The schedule's F, B, I and W alone: no offload, no step among them, and recomputation within the backward."""
    return replace(
        schedule,
        orders=tuple(tuple(op for op in order if op.kind in COMPUTE) for order in schedule.orders),
        fused_recompute=schedule.fused_recompute | {stage for stage, _ in schedule.explicit_recompute},
        recompute_fraction={},
        offload_fraction={},
        deeper=frozenset(),
        peers={},
        asynchronous=frozenset(),
        link_orders=(),
    )


def whole_backwards(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule with one B in place of I and W on these stages.

    torch splits a backward by its graph: a checkpointed layer recomputes once for every group of parameters, in I and
    in W.  As one B it recomputes once.
    """

    def fused(op: Op) -> Op | None:
        if op.stage not in stages or op.kind not in (Kind.I, Kind.W):
            return op
        return Op(Kind.B, op.stage, op.micro_batch) if op.kind is Kind.I else None

    orders = tuple(tuple(new for op in order if (new := fused(op)) is not None) for order in schedule.orders)
    return schedule if orders == schedule.orders else replace(schedule, orders=orders)


LOOPS = frozenset({"linear", "looped", "v_shape"})
"""Placements of frameworks that take a given order."""
