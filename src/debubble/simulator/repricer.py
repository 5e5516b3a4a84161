"""Fast evaluation of one schedule's order under many different costs, for planners.

Lowering determines the dependencies; for a fixed order, costs change only durations and sizes.  `Repricer` lowers once
per kind of links, then evaluates costs with a few array passes.  If lanes serve requests first come, first served
(blocking messages, link groups), dependencies depend on the costs, and each evaluation needs its own lowering.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from debubble.ir import Kind, Lane, Program, Schedule, StageCosts, lower
from debubble.ir.arrays import Floats, Ints
from debubble.ir.lowering.lower import check_costs
from debubble.ir.lowering.op_costs import OpCosts, Tables, table_indices
from debubble.ir.ops import CODE, TRANSFERS
from debubble.ir.program import LANE_CODE
from debubble.ir.stage_costs import CommunicationModel, HostLink
from debubble.simulator.engine import Graph, simulate
from debubble.simulator.timeline import Timeline


@dataclass(frozen=True)
class Price:
    """Makespan and span in the costs' unit of time, and peak memory per device in bytes."""

    makespan: float
    span: float
    peak_memory: tuple[float, ...]


class Repricer:
    """Evaluates one order of operations.  Raises DeadlockError if the order cannot run at all.

    Attributes:
        schedule: The order.
        simulations: Number of evaluations that needed lowering and simulation, which take much longer than the others.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.simulations = schedule, 0
        self._transfers = any(op.kind in TRANSFERS for op in schedule.operations)
        # Without offload, the memory in use follows from the lists alone.
        self._times_decide = bool(schedule.offloaded) or any(op.kind is Kind.S for op in schedule.operations)
        self._structures: dict[tuple[CommunicationModel, HostLink, bool], _Structure] = {}
        self._structure("latency", "full-duplex")

    @property
    def lists_decide(self) -> bool:
        """Whether a device's memory in use follows from its list alone, independent of times."""
        return not self._times_decide

    def price(self, costs: StageCosts, *, fused_recompute: frozenset[int] | None = None) -> Price:
        """Makespan, span and peaks under these costs, ignoring their memory limit.

        `fused_recompute` replaces the schedule's.
        """
        check_costs(self.schedule, costs)
        if costs.communication_model == "blocking" or (costs.link_groups and self._transfers):
            return self._simulate(costs, fused_recompute)
        structure = self._structure(costs.communication_model, costs.host_link, gathers=costs.gathers)
        entries = structure.entries(self._op_costs(costs, fused_recompute))
        start, end = structure.times(entries)
        if self._times_decide or costs.gathers:
            peaks = structure.timed_peaks(costs, entries, start, end)
        else:
            peaks = structure.peaks(costs, entries.allocated, entries.freed)
        return Price(float(end.max()), structure.span(start, end), peaks)

    def peak_memory(self, costs: StageCosts, *, fused_recompute: frozenset[int]) -> tuple[float, ...]:
        """Peak memory of each device as counted in lowering; without offload it follows from the order alone.

        Static bytes include buffers for gathered parameters, used or not.
        """
        if self._times_decide:
            return self.price(costs, fused_recompute=fused_recompute).peak_memory
        structure = self._structure("latency", "full-duplex")
        return structure.peaks(costs, *structure.sizes(self._op_costs(costs, fused_recompute)))

    def _op_costs(self, costs: StageCosts, fused_recompute: frozenset[int] | None) -> OpCosts:
        priced = OpCosts.from_schedule(self.schedule, costs)
        return priced if fused_recompute is None else replace(priced, fused_recompute=fused_recompute)

    def _simulate(self, costs: StageCosts, fused_recompute: frozenset[int] | None) -> Price:
        schedule = self.schedule
        self.simulations += 1
        if fused_recompute is not None:
            schedule = replace(schedule, fused_recompute=fused_recompute)
        timeline = simulate(schedule, costs.with_limit(None))
        return Price(float(timeline.makespan), float(timeline.span), tuple(map(float, timeline.peak_memory)))

    def _structure(
        self, communication: CommunicationModel, host_link: HostLink, *, gathers: bool = False
    ) -> _Structure:
        key = communication, host_link if self._transfers else "full-duplex", gathers
        if key not in self._structures:
            costs = StageCosts.of(
                stages=self.schedule.stages, offload=1, communication_model=communication, host_link=host_link,
                parameter_gather=int(gathers), recompute_deeper=1, activation_deeper=0,
                offload_overlap=1, reload_overlap=1, recompute_overlap=1,
            )  # fmt: skip
            self._structures[key] = _Structure(lower(self.schedule, costs))
        return self._structures[key]


class _Structure:
    """The part of a lowered Program that does not depend on costs: its edges, lists and lanes."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, Graph(program.predecessors, compiled=True)
        _, _, order = self.graph.times(np.zeros(len(program.kind)), np.zeros(len(program.kind)))
        if len(order) < len(program.kind):
            raise program.deadlock(order.tolist())
        schedule = program.schedule
        explicit = schedule.positions[CODE[Kind.R], program.stage, program.micro_batch] >= 0
        self.level = schedule.levels(explicit, program.stage, program.micro_batch)
        self.explicit = bool(self.level.any())
        lanes = np.flatnonzero(program.lane == LANE_CODE[Lane.COMPUTE])
        self.compute_instructions = lanes[np.argsort(program.device[lanes], kind="stable")]
        """The instructions of the compute lanes, by device."""
        self.lane_begins = np.searchsorted(program.device[self.compute_instructions], np.arange(program.devices))
        longest = max(map(len, schedule.orders))
        self.operations_of = np.full((program.devices, longest), -1)
        """The operations of each device's list; -1 after its end."""
        for device, indices in enumerate(np.split(np.arange(len(schedule.arrays.kind)), _ends(schedule))):
            self.operations_of[device, : len(indices)] = indices

    def entries(self, costs: OpCosts) -> Tables:
        """Time, memory effect and lead of each instruction."""
        program, tables = self.program, costs.tables(dtype=np.float64, explicit=self.explicit)
        index = tables.indices(self.level, program.kind, program.stage, program.micro_batch)
        return Tables(*(table.ravel()[index] for table in tables))

    def sizes(self, costs: OpCosts) -> tuple[Floats, Floats]:
        """Bytes that each instruction allocates and frees."""
        program, tables = self.program, costs.sizes(dtype=np.float64, explicit=self.explicit)
        index = table_indices(tables[0], self.level, program.kind, program.stage, program.micro_batch)
        allocated, freed = (table.ravel()[index] for table in tables)
        return allocated, freed

    def times(self, entries: Tables) -> tuple[Floats, Floats]:
        """Start and end of each instruction."""
        start, end, _ = self.graph.times(entries.time, entries.lead)
        return start, end

    def span(self, start: Floats, end: Floats) -> float:
        """Maximum over devices of the time from the compute lane's first start to its last end."""
        last, first = (
            reduce(times[self.compute_instructions], self.lane_begins)
            for reduce, times in ((np.maximum.reduceat, end), (np.minimum.reduceat, start))
        )
        return float((last - first).max())

    def peaks(self, costs: StageCosts, allocated: Floats, freed: Floats) -> tuple[float, ...]:
        """Peak memory of each device without offload, from its list alone.

        Args:
            costs: The stages' costs.
            allocated: Bytes that each instruction allocates.
            freed: Bytes that it frees.
        """
        used, freed_bytes = (np.cumsum(np.append(size, 0.0)[self.operations_of], axis=1) for size in (allocated, freed))
        used[:, 1:] -= freed_bytes[:, :-1]
        peaks = used.max(axis=1)
        return tuple(float(costs.static_of(d)) + max(0.0, peak) for d, peak in enumerate(peaks.tolist()))

    def timed_peaks(self, costs: StageCosts, entries: Tables, start: Floats, end: Floats) -> tuple[float, ...]:
        """Peak memory of each device."""
        program = replace(self.program, costs=costs, allocated=entries.allocated, freed=entries.freed)
        return tuple(map(float, Timeline(program=program, start=start, end=end).peak_memory))


def _ends(schedule: Schedule) -> Ints:
    """The index among all operations at which each device's list ends, except the last device's."""
    ends: Ints = np.cumsum([*map(len, schedule.orders)])[:-1]
    return ends
