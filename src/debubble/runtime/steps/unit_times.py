"""Times of the units of a device, measured within the operations of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median

from debubble.ir import Kind
from debubble.ir.trace import UnitTime
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, Mark
from debubble.runtime.models.stage import Stage

_Units = tuple[str, int, int, int]
"""A kind, a stage, and which of its units, as in UnitTime."""
_NOT_MEASURED = nullcontext()


class UnitTimes:
    """Marks the moments between units while `enabled`: of forwards unit by unit, of backwards segment by segment."""

    def __init__(self, lanes: CpuLanes | CudaLanes) -> None:
        self.enabled = False
        self._lanes = lanes
        self._marks: list[tuple[_Units, Mark, Mark]] = []

    def start_step(self) -> None:
        """Forget the step before."""
        self._marks.clear()

    def observe(self, number: int, stage: Stage) -> None:
        """Measure the units of this stage from now on."""
        stage.timed = partial(self._timed, number)

    def medians(self) -> tuple[UnitTime, ...]:
        """The times of the last step, the median over its micro-batches."""
        seconds = self._lanes.seconds([mark for _, *marks in self._marks for mark in marks])
        found: defaultdict[_Units, list[float]] = defaultdict(list)
        for (units, _, _), start, end in zip(self._marks, seconds[::2], seconds[1::2], strict=True):
            found[units].append(end - start)
        return tuple(UnitTime(*units, seconds=median(times)) for units, times in found.items())

    def _timed(self, stage: int, kind: Kind, first: int, count: int) -> AbstractContextManager[None]:
        return self._between_marks((kind.value, stage, first, count)) if self.enabled else _NOT_MEASURED

    @contextmanager
    def _between_marks(self, units: _Units) -> Iterator[None]:
        start = self._lanes.mark()
        yield
        self._marks.append((units, start, self._lanes.mark()))
