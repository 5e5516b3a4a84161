"""The order problem, to order the operations of every device, and incumbents, its solutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from debubble.ir import DebubbleError, InputError, Kind, Number, Op, Placement, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.ops import TRANSFERS
from debubble.ir.schedule import Shares
from debubble.simulator import Timeline, simulate

Objective = Literal["makespan", "span"]


@dataclass(frozen=True, kw_only=True)
class OrderProblem:
    """Find the order of S stages x m micro-batches that minimizes the objective under `costs.memory_limit`.

    Attributes:
        placement: The S stages on devices.
        micro_batches: The number of micro-batches, m.
        costs: Times and bytes per stage.
        split: Whether backwards may be split into I and W; any backward may still be one operation.
        offload: Whether activations may be offloaded to the host, which needs `costs.offload`.
        recompute: Whether activations may be dropped and restored by an R.
        objective: `makespan` or `span`.
        fused_recompute: Stages with fused recomputation, as in Schedule; it and the following are fixed.
        recompute_fraction: Fraction of a stage's droppable activation that is recomputed.
        offload_fraction: Fraction of a stage's activation that an offload moves.
        asynchronous: Boundaries whose messages never block.
        host_steps: Stages whose optimizer steps on the host; their transfers and steps are not ordered, but count in
            the objective.
    """

    placement: Placement
    micro_batches: int
    costs: StageCosts
    split: bool = True
    offload: bool = False
    recompute: bool = False
    objective: Objective = "makespan"
    fused_recompute: frozenset[int] = frozenset()
    recompute_fraction: Shares = field(default_factory=dict)
    offload_fraction: Shares = field(default_factory=dict)
    asynchronous: frozenset[int] = frozenset()
    host_steps: frozenset[int] = frozenset()
    _last: list[tuple[Schedule, Timeline]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The last simulated schedule with its timeline."""

    def __post_init__(self) -> None:
        if self.costs.stages != self.placement.stages:
            raise InputError(
                f"The costs are for {self.costs.stages} stages, but the placement has {self.placement.stages}."
            )
        if self.offload and self.costs.offload is None:
            raise InputError("Searching with offload needs costs with an 'offload' time.")

    @staticmethod
    def from_schedule(schedule: Schedule, costs: StageCosts, *, objective: Objective = "makespan") -> OrderProblem:
        """The problem of which a schedule is one solution; with an offload time in the costs, activations may move.

        Choices that the schedule makes for full stages become part of the problem.
        """
        return OrderProblem(
            placement=schedule.placement,
            micro_batches=schedule.micro_batches,
            costs=costs,
            offload=costs.offload is not None,
            recompute=bool(schedule.explicit_recompute),
            objective=objective,
            fused_recompute=schedule.fused_recompute,
            recompute_fraction=schedule.recompute_fraction,
            offload_fraction=schedule.offload_fraction,
            asynchronous=schedule.asynchronous,
        )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.placement.devices

    @property
    def stages(self) -> int:
        """The number of stages, S."""
        return self.placement.stages

    @property
    def frees_memory(self) -> bool:
        """Whether an activation may leave memory between its forward and its backward."""
        return self.offload or self.recompute

    @property
    def levels(self) -> int:
        """The number of levels by which an R may recompute a stage; 0 without R."""
        return (1 if self.costs.recompute_deeper is None else 2) if self.recompute else 0

    @property
    def has_fused_and_explicit_recompute(self) -> bool:
        """Whether stages recompute within their backwards unless an R does so for a micro-batch.

        A backward then takes less time after an R, which exact models do not cover.
        """
        return self.recompute and bool(self.fused_recompute)

    @property
    def is_uniform(self) -> bool:
        """Whether an operation takes the same time and memory for every micro-batch."""
        shares = (*self.recompute_fraction.values(), *self.offload_fraction.values())
        equal = self.costs.micro_batch_scale is None and self.slices == 1
        return equal and not any(isinstance(share, tuple) for share in shares)

    @property
    def slices(self) -> int:
        """Slices per sequence; `micro_batches` counts slices."""
        return self.costs.slices

    @cached_property
    def op_costs(self) -> OpCosts:
        """The costs of operations; with `explicit`, of pairs that an R recomputes."""
        return OpCosts(
            costs=self.costs,
            fused_recompute=self.fused_recompute,
            recompute_fraction=self.recompute_fraction,
            offload_fraction=self.offload_fraction,
        )

    def schedule(
        self,
        orders: Iterable[Iterable[Op]],
        *,
        name: str = "searched",
        deeper: frozenset[tuple[int, int]] = frozenset(),
    ) -> Schedule:
        """Make a schedule of this problem from each device's operations and the pairs that recompute deeper."""
        return Schedule(
            name=name,
            placement=self.placement,
            micro_batches=self.micro_batches,
            orders=tuple(map(tuple, orders)),
            fused_recompute=self.fused_recompute,
            recompute_fraction=self.recompute_fraction,
            offload_fraction=self.offload_fraction,
            deeper=deeper,
            asynchronous=self.asynchronous,
            slices=self.slices,
        )

    @property
    def after_weights(self) -> list[Number]:
        """Time per stage from its last weight gradient to the end of its step on the host; 0 without one."""
        return [send + step for send, step in zip(self.gradient_offloads, self.steps_on_hosts, strict=True)]

    @property
    def gradient_offloads(self) -> list[Number]:
        """Time per stage to send its gradients to the host; 0 if its optimizer is on the device."""
        return [self.costs.gradient_offload[s] if s in self.host_steps else 0 for s in range(self.stages)]

    @property
    def steps_on_hosts(self) -> list[Number]:
        """Time of each stage's optimizer step on the host; 0 if its optimizer is on the device."""
        return [self.costs.host_step[s] if s in self.host_steps else 0 for s in range(self.stages)]

    def max_lead(self, op: Op) -> Number:
        """Maximum time before the end of its forward at which an O may start, or of its reload a B or I."""
        levels = (False, True) if self.recompute else (False,)
        return max(self.op_costs.lead(op, explicit=explicit) for explicit in levels)

    def backward_lead(self, stage: int) -> Number:
        """Maximum time before the end of its reload at which a backward (I or B) of a stage may start."""
        kinds = (Kind.B, Kind.I) if self.split else (Kind.B,)
        return max(self.max_lead(Op(kind, stage, 0)) for kind in kinds)

    @property
    def split_covers_fused(self) -> bool:
        """Whether an I followed by its W can replace every B, so that proofs for split backwards hold for fused ones.

        It cannot if the I needs more memory than the B.  That a B may start earlier than an I before the end of its
        reload is handled by `backward_lead`.
        """
        op_costs = self.op_costs
        return not self.split or all(
            op_costs.allocates(Op(Kind.I, s, 0), explicit=explicit)
            <= op_costs.allocates(Op(Kind.B, s, 0), explicit=explicit)
            for explicit in ((False, True) if self.recompute else (False,))
            for s in range(self.stages)
        )

    def timeline(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule with its host steps, unless it was the last one; raises what `simulate` raises."""
        last = self._last[0] if self._last else None
        if last is None or last[0] is not schedule:
            last = schedule, simulate(schedule.with_host_steps(self.host_steps), self.costs)
            self._last[:] = [last]
        return last[1]

    def value(self, schedule: Schedule) -> Number:
        """Simulate a schedule and return its objective in the costs' unit of time; raises what `simulate` raises."""
        timeline = self.timeline(schedule)
        return timeline.makespan if self.objective == "makespan" else timeline.span

    def with_link_orders(self, schedule: Schedule, starts: Mapping[Op, Number]) -> Schedule:
        """The schedule with shared links that serve transfers in the order of these starts, if that is faster.

        Otherwise the schedule as it is, whose links serve transfers first come, first served.
        """
        links = tuple(link for link in self._link_orders(schedule, starts) if link)
        ordered = replace(schedule, link_orders=links)
        try:
            return ordered if links and self.value(ordered) < self.value(schedule) else schedule
        except DebubbleError:
            return schedule

    def _link_orders(self, schedule: Schedule, starts: Mapping[Op, Number]) -> Iterator[tuple[Op, ...]]:
        half_duplex = self.costs.host_link == "half-duplex"
        for group in self.costs.link_groups:
            transfers = [op for device in group for op in schedule.orders[device] if op.kind in TRANSFERS]
            for kinds in (TRANSFERS,) if half_duplex else ((Kind.O,), (Kind.L,)):
                yield tuple(sorted((op for op in transfers if op.kind in kinds), key=starts.__getitem__))


@dataclass(frozen=True, kw_only=True)
class Incumbent:
    """A schedule found by search.

    Attributes:
        schedule: The schedule.
        value: Its objective by exact simulation, in the costs' unit of time.
        bound: Lower bound on the objective of all schedules.
        source: The method that found it: `start`, `search`, `cp-sat`, `pattern`, `cache` or `milp`.
        steps: Moves of the local search up to it.
        seconds: Effort up to it, in seconds of the reference machine.
    """

    schedule: Schedule
    value: Number
    bound: Number
    source: str
    steps: int = 0
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """Largest possible distance from the optimum, as a fraction of the value."""
        return float(max(self.value - self.bound, 0) / self.value) if self.value else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the bound is met, up to rounding."""
        return float(self.value - self.bound) <= 1e-9 * max(1.0, float(self.value))
