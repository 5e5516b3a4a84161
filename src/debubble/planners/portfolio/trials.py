"""The trials of the portfolio: an order of operations on a split of the units, with its price in effort.

If the effort does not suffice for all trials, they are sorted by their step on a scaled-down problem: four devices with
equally many micro-batches per device and their share of activation memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from debubble.costs import Units
from debubble.ir import DebubbleError, InfeasibleError, Placement, Schedule, StageCosts
from debubble.planners.partitioning.balance import (
    balanced_by_device,
    balanced_counts,
    balanced_within,
    even_counts,
)
from debubble.planners.problem import FixedStages, ModelUnits, Problem
from debubble.schedules import schedules
from debubble.search.constructive.zero_bubble import list_order
from debubble.search.effort import DISPATCH_PRICE, LIBRARY_PRICE, LIST_PRICE, OFFLOAD_PRICE, SEARCH_PRICE

LIST = "list schedule"
"""The name of list schedules, which are not in the library."""

SCALED_DEVICES, MAX_SCALED_MICRO_BATCHES = 4, 64
"""Number of devices and maximum number of micro-batches of the scaled-down problem."""
SCALED_TRIES = 8
"""Number of candidates that schedules with an option `tries` may try for the scaled-down problem."""
DIVIDED_COSTS = (
    "forward", "backward_input", "backward_weight", "recompute",
    "activation", "activation_after_input", "activation_recomputed", "offload",
)  # fmt: skip
"""Costs that the stages of the scaled-down problem share equally."""

Split = Literal["even", "balanced", "by device", "within memory"]


@dataclass(frozen=True)
class Order:
    """A kind of order of the operations.

    Attributes:
        schedule: The name of a library schedule, or LIST.
        placement: The placement of stages on devices.
        to_limit: Whether it is built for the memory limit; if not, recomputation has to make it fit.
        searches: Whether it runs an order search of unlimited length while it is built.
    """

    schedule: str
    placement: Placement
    to_limit: bool
    searches: bool = False

    def build(self, problem: Problem, costs: StageCosts, *, tries: int | None = None) -> Schedule:
        """Order a problem's operations for these costs; `tries` limits schedules that try several candidates.

        Raises InfeasibleError if it finds no order that fits, or if the schedule has another number of chunks.
        """
        costs = costs if self.to_limit else costs.with_limit(None)
        placement, objective = self.placement, problem.objective
        if self.schedule == LIST:
            return list_order(LIST, placement, problem.micro_batches, costs, objective=objective)
        entry = schedules[self.schedule]
        steps = None if self.searches else 0
        options = entry.accepted_options(chunks=placement.chunks, objective=objective, tries=tries, steps=steps)
        schedule = entry(devices=placement.devices, micro_batches=problem.micro_batches, costs=costs, **options)
        if schedule.stages != placement.stages:
            raise InfeasibleError(f"It does not have {placement.chunks} chunks per device.")
        return schedule

    def on_devices(self, devices: int) -> Order:
        """This order for another number of devices, without an order search."""
        chunks = self.placement.chunks
        if self.schedule != LIST:
            return replace(self, placement=_placement_of(self.schedule, devices, chunks), searches=False)
        looped = self.placement == Placement.looped(self.placement.devices, chunks)
        return replace(self, placement=(Placement.looped if looped else Placement.v_shape)(devices, chunks))


@dataclass(frozen=True)
class Trial:
    """An order of operations on a split of the units; fixed stages have no other split than `even`."""

    order: Order
    split: Split

    @property
    def without_limit(self) -> Trial | None:
        """The same trial not built for the memory limit; None if this trial is not either."""
        if not self.order.to_limit:
            return None
        return replace(self, order=replace(self.order, to_limit=False, searches=False))

    def price(self, micro_batches: int) -> float:
        """Effort to build and fit the order, in seconds of the reference machine."""
        options = frozenset[str]() if self.order.schedule == LIST else schedules[self.order.schedule].options
        once, per_pair = (
            LIST_PRICE if self.order.schedule == LIST
            else DISPATCH_PRICE if "tries" in options
            else OFFLOAD_PRICE if "variant" in options
            else LIBRARY_PRICE
        )  # fmt: skip
        search = SEARCH_PRICE if self.order.searches else 0
        return once + per_pair * self.order.placement.stages * micro_batches + search


def trials_of(problem: Problem) -> list[Trial]:
    """All trials, sorted: balanced splits, orders not built for the limit, usual and small numbers of chunks first."""

    def rank(trial: Trial) -> tuple[bool, bool, bool, int]:
        order = trial.order
        usual = 1 if order.schedule == LIST else schedules[order.schedule].default_chunks
        return trial.split == "even", order.to_limit, order.placement.chunks != usual, order.placement.chunks

    orders = _orders(problem)
    splits = {placement: _splits(problem, placement) for placement in {order.placement for order in orders}}
    trials = [Trial(order, split) for order in orders for split in splits[order.placement]]
    return sorted(trials, key=rank)


def _splits(problem: Problem, placement: Placement) -> tuple[Split, ...]:
    """The splits to try; `within memory` only if the states of a split by work do not fit."""
    if isinstance(problem.workload, FixedStages):
        return ("even",)
    by_work: tuple[Split, ...] = ("balanced", "even") if placement.chunks == 1 else ("by device", "balanced", "even")
    units = problem.workload.units
    by_memory = balanced_within(units, placement, problem.limits, micro_batches=problem.micro_batches)
    return by_work if by_memory is None else ("within memory", *by_work)


def _orders(problem: Problem) -> list[Order]:
    p = problem.devices
    orders = [
        Order(name, _placement_of(name, p, chunks), to_limit, searches)
        for name, entry in schedules.items()
        for chunks in problem.chunk_choices
        if "slices" not in entry.options and ("chunks" in entry.options or entry.default_chunks == chunks)
        for to_limit in ((False, True) if "memory_limit" in entry.options else (False,))
        for searches in ((False, True) if to_limit and entry.searches else (False,))
    ]
    looped = [Placement.looped(p, chunks) for chunks in problem.chunk_choices]
    # Fixed stages are assumed to be in looped placement.
    vees = [Placement.v_shape(p, v) for v in problem.chunk_choices if isinstance(problem.workload, ModelUnits)]
    limits = (False, True) if problem.memory_limit is not None else (False,)
    listed = [Order(LIST, place, to_limit) for place in dict.fromkeys((*looped, *vees)) for to_limit in limits]
    return [order for order in (*listed, *orders) if problem.allows(order.schedule, order.placement)]


def orders_of_library(problem: Problem) -> list[Order]:
    """Every library schedule, built for the memory limit, without an order search."""
    unlimited = (order for order in _orders(problem) if order.schedule != LIST and not order.to_limit)
    return [replace(order, to_limit=True) for order in unlimited]


@cache
def _placement_of(name: str, devices: int, chunks: int) -> Placement:
    """The placement of a schedule, from building it with one micro-batch; looped if it cannot have just one."""
    entry = schedules[name]
    try:
        return entry(devices=devices, micro_batches=1, **entry.accepted_options(chunks=chunks, tries=1)).placement
    except DebubbleError:
        return Placement.looped(devices, chunks)


def lengths_of(problem: Problem, units: Units, trial: Trial) -> list[int]:
    """Units per stage of a trial."""
    placement = trial.order.placement
    match trial.split:
        case "even":
            return even_counts(units, placement.stages)
        case "balanced":
            return balanced_counts(units, placement.stages)
        case "by device":
            return balanced_by_device(units, placement)
        case "within memory":
            by_memory = balanced_within(units, placement, problem.limits, micro_batches=problem.micro_batches)
            return by_memory or balanced_by_device(units, placement)


def scaled_problem(problem: Problem, chunks: int) -> tuple[Problem, StageCosts] | None:
    """A similar problem on few devices, with its costs; None if this one has as few."""
    p, m = problem.devices, problem.micro_batches
    if p <= SCALED_DEVICES:
        return None
    match problem.workload:
        case FixedStages(costs):
            total = costs.with_limit(None)
        case ModelUnits(units):
            names = ["full" if "full" in unit.strategies else "none" for unit in units.units]
            total = units.stage_costs((tuple(enumerate(names)),), Placement.linear(1))
    capacity = min(limit - float(sum(total.static)) / p for limit in problem.limits)
    entries = {name: values for name in DIVIDED_COSTS if (values := getattr(total, name)) is not None}
    shares: dict[str, Any] = {name: float(sum(values)) * (1 / (p * chunks)) for name, values in entries.items()}
    scaled = StageCosts.of(
        stages=SCALED_DEVICES * chunks,
        **shares,
        communication=float(max(total.communication)),
        memory_limit=None if capacity == float("inf") else max(capacity, 0.0) * SCALED_DEVICES / p,
    )
    micro_batches = min(max(1, round(m * SCALED_DEVICES / p)), MAX_SCALED_MICRO_BATCHES)
    return Problem(
        workload=FixedStages(scaled), devices=SCALED_DEVICES, chunks=chunks, micro_batches=micro_batches,
        objective=problem.objective,
    ), scaled  # fmt: skip
