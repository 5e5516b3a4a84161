"""The waits that keep a device under its memory limit.

The accounting is static: it follows a device's list, and counts memory as free only if it is certainly freed when an
operation starts.  So a lowered Program stays within the limit for all durations of its operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from debubble.errors import OutOfMemoryError, readable
from debubble.ir.arrays import Numbers, entries, exact
from debubble.ir.lowering.op_costs import Tables
from debubble.ir.ops import CODE, COMPUTE, RESHARDS, UNSHARDS, Kind, Op
from debubble.ir.schedule import OpArrays, Schedule
from debubble.ir.stage_costs import Number, StageCosts


@dataclass
class _Offload:
    position: int
    size: Number
    known_to_reloads: bool = False


def check_memory(schedule: Schedule, costs: StageCosts, device: int, tables: Tables) -> None:
    """Raise OutOfMemoryError, like lowering, if a device's list does not fit its limit."""
    limit = costs.limit_of(device)
    if limit is not None:
        for _ in Admission(schedule, costs, device, tables, costs.static_of(device), limit).waits():
            pass


@dataclass
class Admission:
    """Finds the operations that each operation of a device's list must wait for under the memory limit.

    `used` bytes of the `limit` are allocated before the first operation.
    """

    schedule: Schedule
    costs: StageCosts
    device: int
    tables: Tables
    used: Number
    limit: Number
    _offloads: list[_Offload] = field(default_factory=list)
    """Offloads that no compute operation has waited for yet, oldest first."""
    _last: int | None = None
    """The last compute operation."""
    _last_freed: Number = 0
    """Bytes that it frees at its end, which are not yet free for a reload next to it."""

    def __post_init__(self) -> None:
        kind, stage, micro_batch, _ = OpArrays.from_orders([self._order])
        pair = stage * self.schedule.micro_batches + micro_batch
        explicit = np.isin(pair, pair[kind == CODE[Kind.R]])
        indices = self.tables.indices(self.schedule.levels(explicit, stage, micro_batch), kind, stage, micro_batch)
        self.allocated, self.freed = entries(self.tables.allocated, indices), entries(self.tables.freed, indices)
        # Static bytes include gathered parameters.
        gathers = np.isin(kind, [CODE[k] for k in (*UNSHARDS, *RESHARDS)])
        self.allocated, self.freed = np.where(gathers, 0, self.allocated), np.where(gathers, 0, self.freed)
        host_steps = np.isin(stage, stage[kind == CODE[Kind.D]])
        self.computes = np.isin(kind, [CODE[k] for k in COMPUTE]) | ((kind == CODE[Kind.S]) & ~host_steps)

    def waits(self) -> Iterator[tuple[int, int]]:
        """Yield the waits for memory, as positions of an operation and of one that must end before it starts.

        Raises OutOfMemoryError if an operation can never start.
        """
        self.reserved = self.used
        if any(op.kind is Kind.O for op in self._order) or not self._fits_without_waits():
            columns = zip(self.allocated.tolist(), self.freed.tolist(), self.computes.tolist(), strict=True)
            for position, (allocated, freed, computes) in enumerate(columns):
                for other in self._admit(position, allocated, freed, computes):
                    yield position, other

    @property
    def _order(self) -> tuple[Op, ...]:
        return self.schedule.orders[self.device]

    def _fits_without_waits(self) -> bool:
        """Tell whether the operations of a list without offloads fit without waits."""
        allocated, freed = self.allocated[self.computes], self.freed[self.computes]
        changes = np.stack((-freed, allocated), axis=1).ravel()
        reserved: Numbers = np.cumsum(np.concatenate((exact([self.used]), changes)))[:-1:2]
        return not bool(np.any((allocated != 0) & (reserved + allocated > self.limit)))

    def _admit(self, position: int, allocated: Number, freed: Number, computes: bool) -> list[int]:
        """The positions of operations that must end before this one starts; OutOfMemoryError if no wait suffices."""
        kind = self._order[position].kind
        if kind is Kind.L:
            waits = self._admit_reload(position, allocated)
        elif kind is Kind.O:
            self._offloads.append(_Offload(position, freed))
            return []
        elif not computes:
            return []
        else:
            waits = self._admit_compute(position, allocated)
            self._last, self._last_freed = position, freed
            self.reserved -= freed
        self.reserved += allocated
        return waits

    def _admit_compute(self, position: int, allocated: Number) -> list[int]:
        waits: list[int] = []
        if not allocated:
            return waits
        while self.reserved + allocated > self.limit and self._offloads:
            oldest = self._offloads.pop(0)
            self.reserved -= oldest.size
            waits.append(oldest.position)
        if self.reserved + allocated > self.limit:
            raise self._out_of_memory(position, self.reserved + allocated - self.limit)
        return waits[-1:]

    def _admit_reload(self, position: int, allocated: Number) -> list[int]:
        waits: list[int] = []
        known = sum(o.size for o in self._offloads if o.known_to_reloads)
        needed = self.reserved + self._last_freed - known + allocated - self.limit
        for offload in self._offloads:
            if needed <= 0:
                break
            if not offload.known_to_reloads:
                offload.known_to_reloads = True
                needed -= offload.size
                waits = [offload.position]
        if needed > 0 and self._last is not None and self._last_freed:
            waits.append(self._last)
            needed -= self._last_freed
            self._last_freed = 0
        if needed > 0:
            raise self._out_of_memory(position, needed)
        return waits

    def _out_of_memory(self, position: int, missing: Number) -> OutOfMemoryError:
        op = self._order[position]
        return OutOfMemoryError(
            device=self.device,
            operation=op.name,
            stage=op.stage,
            micro_batch=op.micro_batch,
            missing=float(missing),
            peak=float(self._peak()),
            limit=float(self.limit),
            advice=self._advice(position, missing),
        )

    def _advice(self, position: int, missing: Number) -> str:
        """Advice: recompute the fewest stages if that suffices, else another order or larger devices."""
        saved: dict[int, Number] = {}
        # Searches often hit the limit, and the device's list is much shorter than the schedule.
        explicit = {(stage, j) for kind, stage, j in self._order if kind is Kind.R}
        for stage, j in self._live(position):
            if stage not in self.schedule.fused_recompute and (stage, j) not in explicit:
                saved[stage] = saved.get(stage, 0) + self.costs.dropped_bytes(stage) * self.costs.scale_of(j)
        chosen: list[int] = []
        for stage in sorted(saved, key=lambda s: (-saved[s], s)):
            if missing <= 0:
                break
            chosen.append(stage)
            missing -= saved[stage]
        if missing <= 0:
            which = f"stage {chosen[0]}" if len(chosen) == 1 else f"stages {', '.join(map(str, sorted(chosen)))}"
            return f"recompute on {which}, or use larger devices"
        if self.used > self.limit:
            states = readable(float(self.used))
            return f"its states alone take {states}: divide them among more devices, or use larger ones"
        if len(self._live(position)) == 1:
            return "a single micro-batch needs more: make it smaller, or use larger devices"
        return "take an order with fewer micro-batches in flight, or larger devices"

    def _live(self, position: int) -> set[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose activations are on the device when an operation has started."""
        live: set[tuple[int, int]] = set()
        for kind, stage, j in self._order[:position]:
            if kind is Kind.F:
                live.add((stage, j))
            elif kind in (Kind.B, Kind.W):
                live.discard((stage, j))
        _, stage, j = self._order[position]
        return live | {(stage, j)}

    def _peak(self) -> Number:
        """Peak bytes of the list if every offload is waited for."""
        peak = used = self.used
        for allocated, freed in zip(self.allocated.tolist(), self.freed.tolist(), strict=True):
            used += allocated
            peak = max(peak, used)
            used -= freed
        return peak
