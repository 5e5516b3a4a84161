"""A stage with tensors: forward, backward (whole or split), recomputation, offload and reload of its micro-batches.

Each unit that recomputes, and each run of units that do not, is a segment with an autograd graph of its own: the
backward walks the segments from last to first and hands the gradient from one to the next.  Both halves of a layer that
recompute in full are one segment, which keeps the layer's input alone, as plans count it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from debubble.ir import InputError, Kind, PlannedUnit
from debubble.runtime.memory.activations import Ledger, SavedStorage, Wait
from debubble.runtime.memory.arena import Place
from debubble.runtime.memory.recomputation import Tape, run_without_recompute
from debubble.runtime.models.compilation import Compiler
from debubble.runtime.models.units import MicroBatch, UnitModule
from debubble.runtime.operators import Deferred, Deferring, WeightGradStore, call

OPERATORS = {
    **{operator: (operator,) for operator in ("norm", "activation", "multiply", "core", "projections")},
    "mlp": ("projections", "activation", "multiply"),
}
"""The operators of each word of a strategy, as the units name them.  A gated MLP has no `activation`: its `multiply`
computes that again in any case."""


def recomputed_operators(strategy: str) -> Callable[[str], bool]:
    """Read which operators a strategy (`PlannedUnit.strategy`) recomputes.  Raises InputError for an unknown one."""
    if strategy == "full":
        return lambda _: True
    words = [] if strategy == "none" else strategy.split("+")
    for word in words:
        if word not in OPERATORS:
            raise InputError(
                f"The runtime does not know the recomputation strategy '{word}'; it knows none, full,"
                f" {', '.join(OPERATORS)}."
            )
    covered = {operator for word in words for operator in OPERATORS[word]}
    return lambda name: name in covered


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """The tensors that a forward saves for its backward."""

    recomputing: int = 0
    """The first so many units save what their strategy says, the others everything."""
    deeper: bool = False
    """True if those have their deeper strategy."""
    counted: bool = True
    """True if the ledger counts what is saved; without, nothing is recomputed or offloaded."""
    split: bool = True
    """True if the backward will be split."""


SAVE_ALL = SavePolicy()


class Stage:
    """The units of one stage, and the tensors of its micro-batches in flight.

    Args:
        units: Modules of the stage, in order.
        planned: Type, layer and recomputation strategy of each.
        ledger: Counts the bytes of saved activations.
        compiler: Compiles the units; None: they run as they are written.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        planned: Sequence[PlannedUnit],
        ledger: Ledger,
        *,
        compiler: Compiler | None = None,
    ) -> None:
        self.units = list(units)
        self.follow(planned)
        self._ledger = ledger
        self._weight_grads = WeightGradStore()
        self._states: dict[int, _MicroBatchState] = {}
        self.timed: Timed = _untimed
        """Measures the units that run in its context."""
        for unit in units:
            if compiler is not None:
                unit.compile_functions(compiler)
            for module in unit.modules():
                if isinstance(module, Deferring):
                    module.weight_grads = self._weight_grads

    def follow(self, planned: Sequence[PlannedUnit]) -> None:
        """Recompute from now on by the strategies of these units, which are the stage's."""
        self._strategies = [[unit.strategies[level] for unit in planned] for level in range(2)]
        """Strategies of all units, and their deeper ones."""
        self._recomputed = [[*map(recomputed_operators, names)] for names in self._strategies]

    def forward(
        self,
        j: int,
        x: Tensor,
        micro_batch: MicroBatch,
        keeping: SavePolicy = SAVE_ALL,
        unit_done: UnitDone | None = None,
    ) -> Tensor:
        """F: the stage's output, detached.

        Args:
            j: The micro-batch.
            x: The stage's input.
            micro_batch: What goes with it.
            keeping: What is kept for the backward.
            unit_done: Called after every unit, where an offload may begin meanwhile.
        """
        state = self._states[j] = _MicroBatchState(counted=keeping.counted)
        self._weight_grads.expected = keeping.split
        try:
            if keeping.counted:
                y = self._forward(state, x, micro_batch, keeping, unit_done)
            else:
                y = self._forward_uncounted(state, x, micro_batch)
        except BaseException as error:
            state.forwarded.set_exception(error)
            raise
        state.forwarded.set_result(None)
        return y

    def _forward(
        self,
        state: _MicroBatchState,
        x: Tensor,
        micro_batch: MicroBatch,
        keeping: SavePolicy,
        unit_done: UnitDone | None,
    ) -> Tensor:
        """The stage's output, whose segments and units it leaves in the state."""
        for first, units, recomputed in self._segments(keeping.recomputing, int(keeping.deeper)):
            tape, entry = Tape(self._ledger, recomputed), _SegmentInput()
            with tape.watch():
                y = entry.connect(x)
                for index, unit in enumerate(units, start=first):
                    with self.timed(Kind.F, index, 1):
                        begin, y = tape.saves, unit(y, micro_batch, tape)
                    state.units.append(_UnitSaves(tape, begin, tape.saves, unit_done() if unit_done else None))
            tape.finish()
            edge = get_gradient_edge(y) if y.requires_grad else None
            state.segments.append(_Segment(tape.restore, entry, edge, first, len(units)))
            x = y.detach()
        return x

    def _forward_uncounted(self, state: _MicroBatchState, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The stage's output by plain autograd, which keeps everything."""
        entry = _SegmentInput()
        y = entry.connect(x)
        for index, unit in enumerate(self.units):
            with self.timed(Kind.F, index, 1):
                y = unit(y, micro_batch, run_without_recompute)
        edge = get_gradient_edge(y) if y.requires_grad else None
        state.segments.append(_Segment(_nothing, entry, edge, 0, len(self.units)))
        return y.detach()

    def evaluate(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Run the units without keeping anything for a backward: the stage's output."""
        for unit in self.units:
            x = unit(x, micro_batch, run_without_recompute)
        return x

    def _segments(
        self, recomputing: int, level: int
    ) -> Iterator[tuple[int, Sequence[UnitModule], Callable[[str], bool]]]:
        """The units that recompute together, and the runs of units between them, which keep everything.

        Each with the index of its first unit, and the operators that it recomputes.
        """

        def shared(index: int) -> tuple[str, int | None]:
            strategy = self._strategies[level][index]
            if index >= recomputing or strategy == "none":
                return "none", None
            layer = self.units[index].half_of
            return ("layer", layer) if strategy == "full" and layer is not None else ("unit", index)

        for (kind, _), indices in groupby(range(len(self.units)), shared):
            first, *others = indices
            recomputed = recomputed_operators("none") if kind == "none" else self._recomputed[level][first]
            yield first, self.units[first : first + 1 + len(others)], recomputed

    def recompute(self, j: int) -> None:
        """R: bring back all that the forward dropped."""
        for segment in self._states[j].segments:
            segment.restore()

    def backward(self, j: int, gradient: Tensor, *, split: bool) -> Tensor | None:
        """B, or I if `split`: the gradient of the stage's input (None for tokens).

        What is still dropped is recomputed unit by unit, right before the unit's backward.
        """
        state = self._states[j]
        state.units.clear()
        if split:
            self._weight_grads.collect_in(self._ledger if state.counted else None, state.deferred)
        flowing: Tensor | None = gradient
        while state.segments:
            segment = state.segments.pop()
            if segment.edge is not None and flowing is not None:
                with self.timed(Kind.I if split else Kind.B, segment.first, segment.count):
                    segment.restore()
                    # Backwards compute in the dtypes of their forwards.
                    with torch.autocast(flowing.device.type, enabled=False):
                        torch.autograd.backward([segment.edge], [flowing])
            flowing = segment.entry.gradient
        self._weight_grads.close()
        if not split:
            del self._states[j]
        return flowing

    def weights(self, j: int) -> None:
        """W: the weight gradients that I left, in its order."""
        state = self._states.pop(j)
        for deferred in state.deferred:
            deferred()
        state.deferred.clear()

    def forget(self) -> None:
        """Let go of all that forwards have left: there will be no backward."""
        self._states.clear()

    def offload(self, j: int, share: float, allocate: Callable[[int], Tensor]) -> Tensor:
        """O: copy that share of what is kept, the first units', into one buffer of `allocate(bytes)`.

        Every unit's copies wait for its forward alone.  How many bytes are kept is known once the forward has returned.
        """
        state = self._states[j]
        state.forwarded.result()
        storages: dict[int, tuple[SavedStorage, int]] = {}
        for number, unit in enumerate(state.units):
            for saved in unit.tape.saved(unit.begin, unit.end):
                if saved.on_device:
                    storages.setdefault(id(saved), (saved, number))
        parts = _take_share([saved for saved, _ in storages.values()], share)
        buffer = allocate(sum(size for _, size in parts))
        offset, waited = 0, -1
        for saved, size in parts:
            _, number = storages[id(saved)]
            wait = state.units[number].wait
            if number > waited and wait is not None:
                wait()
                waited = number
            state.moved.setdefault(number, []).append((saved, offset))
            saved.copy_to(buffer[offset : offset + size])
            offset += size
        state.copied = parts
        return buffer

    def release(self, j: int) -> None:
        """Let go of what O has copied, once its copies are over; the current stream keeps the rest of it."""
        copied = self._states[j].copied
        while copied:
            saved, size = copied.pop()
            saved.offload(size)

    def allocate_reload(self, j: int, place: Place | None = None) -> None:
        """Allocate, at a planned place or in the current stream, what `reload` will fill, unless it is there."""
        for unit in self._states[j].moved.values():
            for saved, _ in unit:
                saved.allocate_reload(place)

    def has_reload_buffer(self, j: int) -> bool:
        """Tell whether what `reload` will fill is there."""
        return all(saved.has_reload_buffer for unit in self._states[j].moved.values() for saved, _ in unit)

    def reload(self, j: int, buffer: Tensor, *, to_recompute: bool = False, unit_done: UnitDone | None = None) -> None:
        """L: fill the buffers with what O moved, the last units first, or `to_recompute` (for an R) the first.

        With `unit_done` a backward may begin meanwhile: it is called after every unit, and what uses a unit's storage
        waits for it.
        """
        moved = [*self._states[j].moved.values()]
        if to_recompute:
            moved.reverse()
        self._states[j].moved.clear()
        arrivals = [Future[Wait]() for _ in moved]
        if unit_done is not None:
            for number, arrival in enumerate(arrivals):
                _expect(moved[number], arrival)
        try:
            while moved:
                # Nothing here refers to the unit afterwards: a backward that begins then frees it, too.
                _fill(moved.pop(), buffer)
                if unit_done is not None:
                    wait = unit_done()
                    arrivals.pop().set_result(wait)
        except BaseException as error:
            # Who waits must not wait for ever.
            for arrival in arrivals:
                arrival.set_exception(error)
            raise


_MovedUnit = list[tuple[SavedStorage, int]]
"""The storages of a unit that O has moved, and the place in its buffer at which each begins."""

UnitDone = Callable[[], Wait]
"""Called when the current lane was given all of a unit's work; the answer waits for that on another lane."""
Timed = Callable[[Kind, int, int], AbstractContextManager[None]]
"""A context in which units run within an operation of a kind: from which unit of the stage on, and how many."""

_UNTIMED = nullcontext()


def _untimed(kind: Kind, first: int, count: int) -> AbstractContextManager[None]:
    return _UNTIMED


@dataclass
class _MicroBatchState:
    """The tensors of one micro-batch between its forward and its backward."""

    counted: bool
    segments: list[_Segment] = field(default_factory=list)
    deferred: list[Deferred] = field(default_factory=list)
    units: list[_UnitSaves] = field(default_factory=list)
    forwarded: Future[None] = field(default_factory=Future)
    """Done when the forward has returned."""
    copied: list[tuple[SavedStorage, int]] = field(default_factory=list)
    """Storages that O has copied, and how many bytes of each."""
    moved: dict[int, _MovedUnit] = field(default_factory=dict)
    """By unit, in their order."""


@dataclass(frozen=True)
class _UnitSaves:
    """A unit's part of what its segment's tape saves, from one number of saves to another, and the wait for it."""

    tape: Tape
    begin: int
    end: int
    wait: Wait | None


@dataclass
class _Segment:
    """One segment's part: what brings back what it dropped, its input's gradient, and where its backward starts."""

    restore: Callable[[], None]
    entry: _SegmentInput
    edge: GradientEdge | None
    first: int
    """The index of its first unit."""
    count: int


def _expect(unit: _MovedUnit, arrival: Future[Wait]) -> None:
    """Let what uses a unit's storages wait for their arrival."""
    for saved, _ in unit:
        saved.arrival = arrival


def _fill(unit: _MovedUnit, buffer: Tensor) -> None:
    """Bring a unit's storages back from the buffer of what O moved."""
    for saved, offset in unit:
        saved.reload(buffer[offset:])


def _nothing() -> None:
    """Bring back what a segment dropped that keeps everything."""


class _SegmentInput:
    """The input of a segment's graph.  A leaf would pin its storage; this only catches its gradient."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def connect(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        anchor = torch.empty(0, device=x.device, requires_grad=True)
        return call(_CatchGradient, x, anchor, self)


class _CatchGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, entry: _SegmentInput) -> Tensor:
        ctx.entry = entry
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.entry.gradient = gradients[0]
        return None, None, None


def _take_share(saved: Sequence[SavedStorage], share: float) -> list[tuple[SavedStorage, int]]:
    """Storages and how many bytes of each to move, so that the sum is that share of all; only the last is divided."""
    budget = round(sum(s.nbytes for s in saved) * share)
    parts: list[tuple[SavedStorage, int]] = []
    for s in saved:
        size = min(s.nbytes, budget)
        if size:
            parts.append((s, size))
        budget -= size
    return parts
