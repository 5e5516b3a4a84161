"""The order problem: in which order should every device do its operations?  And the incumbents that answer it."""

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
    """Find the order of S stages x m micro-batches that takes the least time under `costs.memory_limit`.

    Attributes:
        placement: The S stages on devices.
        micro_batches: m.
        costs: Times and bytes per stage.
        split: I and W may stand apart; any backward may still be one operation.
        offload: Activations may go to the host, which needs `costs.offload`.
        recompute: Activations may be dropped and brought back by an R.
        objective: `makespan` or `span`.
        fused_recompute: As in Schedule, like all that follow: fixed for whole stages.
        recompute_fraction: Share of a stage's droppable activation that recomputation brings back.
        offload_fraction: Share of a stage's activation that an offload moves.
        asynchronous: Boundaries whose messages never block.
        host_steps: Stages whose optimizer steps on the host; their transfers and steps stand in no order that is
            searched, but count in its value.
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
    """The schedule that was simulated last, with its timeline."""

    def __post_init__(self) -> None:
        if self.costs.stages != self.placement.stages:
            raise InputError(
                f"The costs are for {self.costs.stages} stages, but the placement has {self.placement.stages}."
            )
        if self.offload and self.costs.offload is None:
            raise InputError("Searching with offload needs costs with an 'offload' time.")

    @staticmethod
    def of(schedule: Schedule, costs: StageCosts, *, objective: Objective = "makespan") -> OrderProblem:
        """State the problem that a schedule is one answer to; with an offload time in the costs, activations may move.

        What the schedule recomputes and fixes for whole stages becomes part of the problem.
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
        """True if an activation may leave memory between its forward and its backward."""
        return self.offload or self.recompute

    @property
    def levels(self) -> int:
        """The number of levels by which an R may recompute a stage; 0 if none may."""
        return (1 if self.costs.recompute_deeper is None else 2) if self.recompute else 0

    @property
    def recomputes_in_two_ways(self) -> bool:
        """True if stages recompute within their backwards and an R may do it for single micro-batches instead.

        A backward then takes less time after an R, which exact models do not know.
        """
        return self.recompute and bool(self.fused_recompute)

    @property
    def alike(self) -> bool:
        """True if an operation takes the same time and memory for every micro-batch."""
        shares = (*self.recompute_fraction.values(), *self.offload_fraction.values())
        equal = self.costs.micro_batch_scale is None and self.slices == 1
        return equal and not any(isinstance(share, tuple) for share in shares)

    @property
    def slices(self) -> int:
        """Slices of every sequence, all of which `micro_batches` counts."""
        return self.costs.slices

    @cached_property
    def op_costs(self) -> OpCosts:
        """The costs of operations; `explicit` prices those that an R recomputes."""
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
        """Make a schedule of this problem, of the operations of each device in order, and what recomputes deeper."""
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
        """The time of each stage from its last weight gradient to the end of its step on the host; 0 without one."""
        return [gone + step for gone, step in zip(self.gradient_offloads, self.steps_on_hosts, strict=True)]

    @property
    def gradient_offloads(self) -> list[Number]:
        """The time in which the gradients of each stage go to the host that steps its optimizer; 0 if none does."""
        return [self.costs.gradient_offload[s] if s in self.host_steps else 0 for s in range(self.stages)]

    @property
    def steps_on_hosts(self) -> list[Number]:
        """The time of each stage's optimizer step on the host; 0 if it is not there."""
        return [self.costs.host_step[s] if s in self.host_steps else 0 for s in range(self.stages)]

    def longest_lead(self, op: Op) -> Number:
        """The most time before the end of its forward at which an O may start, or of its reload a B or I."""
        levels = (False, True) if self.recompute else (False,)
        return max(self.op_costs.lead(op, explicit=again) for again in levels)

    def backward_lead(self, stage: int) -> Number:
        """The most time before the end of its reload at which a backward of a stage (I, or B) may start."""
        kinds = (Kind.B, Kind.I) if self.split else (Kind.B,)
        return max(self.longest_lead(Op(kind, stage, 0)) for kind in kinds)

    @property
    def halves_cover_wholes(self) -> bool:
        """True if an I with its W after it can stand for every B, so that what holds for all I and W holds for B too.

        It cannot where the I needs more memory: its recomputation may bring back more at a time, or leave the W more.
        That a B may begin earlier before the end of its reload than an I is for `backward_lead`.
        """
        op_costs = self.op_costs
        return not self.split or all(
            op_costs.allocates(Op(Kind.I, s, 0), explicit=again) <= op_costs.allocates(Op(Kind.B, s, 0), explicit=again)
            for again in ((False, True) if self.recompute else (False,))
            for s in range(self.stages)
        )

    def timeline(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule with the steps of hosts, unless it was the last one; raises what `simulate` raises."""
        last = self._last[0] if self._last else None
        if last is None or last[0] is not schedule:
            last = schedule, simulate(schedule.with_host_steps(self.host_steps), self.costs)
            self._last[:] = [last]
        return last[1]

    def value(self, schedule: Schedule) -> Number:
        """Simulate a schedule, and return its objective in the costs' unit of time; raises what `simulate` raises."""
        timeline = self.timeline(schedule)
        return timeline.makespan if self.objective == "makespan" else timeline.span

    def with_link_orders(self, schedule: Schedule, starts: Mapping[Op, Number]) -> Schedule:
        """The schedule whose shared links serve transfers in the order of these starts, if that is faster.

        It is not where links that serve transfers by arrival take as little time.
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
        bound: A time that no schedule can beat.
        source: The method that found it: `start`, `search`, `cp-sat`, `pattern`, `cache` or `milp`.
        steps: Moves of the local search until then.
        seconds: Effort until then, in seconds of the reference machine.
    """

    schedule: Schedule
    value: Number
    bound: Number
    source: str
    steps: int = 0
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """Largest distance of the schedule from the optimum, as a share of its value."""
        return float(max(self.value - self.bound, 0) / self.value) if self.value else 0.0

    @property
    def optimal(self) -> bool:
        """True if the bound is met, up to rounding: no schedule is better."""
        return float(self.value - self.bound) <= 1e-9 * max(1.0, float(self.value))
