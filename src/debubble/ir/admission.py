"""The waits that keep a device under its memory limit.

The accounting is static: it follows a device's list and counts as free only what has certainly been freed when
an operation starts, so a lowered Program stays within the limit however long its operations really take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from debubble.ir.costs import Number, StageCosts
from debubble.ir.effects import change, guests
from debubble.ir.errors import OutOfMemoryError, readable
from debubble.ir.ops import Kind, Op
from debubble.ir.schedule import Schedule


@dataclass
class _Offload:
    op: Op
    size: Number
    known_to_reloads: bool = False


@dataclass
class Admission:
    """Walks one device's list and says which operations each one must wait for, so that memory suffices."""

    schedule: Schedule
    costs: StageCosts
    device: int
    reserved: Number
    limit: Number | None
    _offloads: list[_Offload] = field(default_factory=list)
    """In flight as far as the compute lane knows, oldest first."""
    _last_freed: Number = 0
    """What the last compute operation frees at its end, which a reload beside it does not yet have."""
    _last: Op | None = None
    _live: set[tuple[int, int]] = field(default_factory=set)

    def admit(self, op: Op) -> list[Op]:
        """The operations that must have ended before `op` starts; raises OutOfMemoryError if none would help."""
        allocated, freed = change(self.schedule, self.costs, op)
        if op.kind is Kind.L:
            waits = self._admit_reload(op, allocated)
        elif op.kind is Kind.O:
            self._offloads.append(_Offload(op, freed))
            return []
        elif not self.schedule.computes(op):
            return []
        else:
            waits = self._admit_compute(op, allocated)
            self._last, self._last_freed = op, freed
            self.reserved -= freed
        self._track(op)
        self.reserved += allocated
        return waits

    def _admit_compute(self, op: Op, allocated: Number) -> list[Op]:
        waits: list[Op] = []
        if self.limit is None or not allocated:
            return waits
        while self.reserved + allocated > self.limit and self._offloads:
            oldest = self._offloads.pop(0)
            self.reserved -= oldest.size
            waits.append(oldest.op)
        if self.reserved + allocated > self.limit:
            raise self._out_of_memory(op, self.reserved + allocated - self.limit)
        return waits[-1:]

    def _admit_reload(self, op: Op, allocated: Number) -> list[Op]:
        if self.limit is None:
            return []
        waits: list[Op] = []
        known = sum(o.size for o in self._offloads if o.known_to_reloads)
        needed = self.reserved + self._last_freed - known + allocated - self.limit
        for offload in self._offloads:
            if needed <= 0:
                break
            if not offload.known_to_reloads:
                offload.known_to_reloads = True
                needed -= offload.size
                waits = [offload.op]
        if needed > 0 and self._last is not None and self._last_freed:
            waits.append(self._last)
            needed -= self._last_freed
            self._last_freed = 0
        if needed > 0:
            raise self._out_of_memory(op, needed)
        return waits

    def _track(self, op: Op) -> None:
        if op.kind is Kind.F:
            self._live.add((op.stage, op.micro_batch))
        elif op.kind in (Kind.B, Kind.W):
            self._live.discard((op.stage, op.micro_batch))

    def _out_of_memory(self, op: Op, missing: Number) -> OutOfMemoryError:
        assert self.limit is not None
        return OutOfMemoryError(
            device=self.device,
            operation=op.name,
            missing=float(missing),
            limit=float(self.limit),
            advice=self._advice(op, missing),
        )

    def _advice(self, op: Op, missing: Number) -> str:
        """The cheapest change: recomputing the fewest stages if that suffices, else larger devices."""
        saved: dict[int, Number] = {}
        for stage, j in self._live | {(op.stage, op.micro_batch)}:
            if not self.schedule.recomputes(stage, j):
                saved[stage] = saved.get(stage, 0) + self.costs.dropped(stage) * self.costs.scale_of(j)
        chosen: list[int] = []
        for stage in sorted(saved, key=lambda s: (-saved[s], s)):
            if missing <= 0:
                break
            chosen.append(stage)
            missing -= saved[stage]
        if missing <= 0:
            which = f"stage {chosen[0]}" if len(chosen) == 1 else f"stages {', '.join(map(str, sorted(chosen)))}"
            return f"recompute on {which}, or use devices with {readable(float(self._peak()))}"
        return f"use devices with {readable(float(self._peak()))}"

    def _peak(self) -> Number:
        """What the list needs at most if no offload is ever waited for less than fully."""
        held: Number = self.costs.static_of(self.device) + guests(self.schedule, self.costs).get(self.device, 0)
        peak = held
        for op in self.schedule.orders[self.device]:
            allocated, freed = change(self.schedule, self.costs, op)
            held += allocated
            peak = max(peak, held)
            held -= freed
        return peak
