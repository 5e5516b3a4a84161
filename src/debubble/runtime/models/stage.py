"""A stage with tensors: forward, backward (fused or split), recomputation, offload and reload of its micro-batches.

Each unit that recomputes, and each run of units that do not, is a segment with its own autograd graph: the backward
runs the segments from last to first and passes the gradient from one to the next.  Both halves of a layer with full
recomputation are one segment, which saves the layer's input only, as plans count it.
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
"""Word of a strategy -> the units' operators.  A gated MLP has no `activation`: its `multiply` always recomputes it."""


def recomputed_operators(strategy: str) -> Callable[[str], bool]:
    """Parse a recomputation strategy: whether it recomputes an operator.  Raises InputError if it is unknown."""
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
    """What a forward saves for its backward."""

    recomputing: int = 0
    """Number of leading units that recompute by their strategies; the others save everything."""
    deeper: bool = False
    """True if they recompute by their deeper strategies."""
    counted: bool = True
    """True if the ledger counts saved tensors, which recomputation and offload require."""
    split: bool = True
    """True if the backward will be split."""


SAVE_ALL = SavePolicy()


class Stage:
    """The units of one stage, and the saved tensors of its micro-batches in flight.

    Args:
        units: Modules of the stage, in order.
        planned: Type, layer and recomputation strategies of each unit.
        ledger: Counts the bytes of saved activations.
        compiler: Compiles the units; None: eager execution.
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
        self.set_strategies(planned)
        self._ledger = ledger
        self._weight_grads = WeightGradStore()
        self._states: dict[int, _MicroBatchState] = {}
        self.timed: Timed = _untimed
        """Makes contexts that measure the units that run in them."""
        for unit in units:
            if compiler is not None:
                unit.compile_functions(compiler)
            for module in unit.modules():
                if isinstance(module, Deferring):
                    module.weight_grads = self._weight_grads

    def set_strategies(self, planned: Sequence[PlannedUnit]) -> None:
        """Set the units' recomputation strategies."""
        self._strategies = [[unit.strategies[level] for unit in planned] for level in range(2)]
        """Strategies of all units, then their deeper ones."""
        self._recomputed = [[*map(recomputed_operators, names)] for names in self._strategies]

    def forward(
        self,
        j: int,
        x: Tensor,
        micro_batch: MicroBatch,
        policy: SavePolicy = SAVE_ALL,
        unit_done: UnitDone | None = None,
    ) -> Tensor:
        """F: the stage's output, detached.

        Args:
            j: The micro-batch.
            x: The stage's input.
            micro_batch: Targets and other arguments of the units.
            policy: What is saved for the backward.
            unit_done: Called after every unit, if an offload streams with the forward.
        """
        state = self._states[j] = _MicroBatchState(counted=policy.counted)
        self._weight_grads.expected = policy.split
        try:
            if policy.counted:
                y = self._forward(state, x, micro_batch, policy, unit_done)
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
        policy: SavePolicy,
        unit_done: UnitDone | None,
    ) -> Tensor:
        """The stage's output; adds segments and units to the state."""
        for first, units, recomputed in self._segments(policy.recomputing, int(policy.deeper)):
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
        """The stage's output by plain autograd, which saves everything."""
        entry = _SegmentInput()
        y = entry.connect(x)
        for index, unit in enumerate(self.units):
            with self.timed(Kind.F, index, 1):
                y = unit(y, micro_batch, run_without_recompute)
        edge = get_gradient_edge(y) if y.requires_grad else None
        state.segments.append(_Segment(_no_op, entry, edge, 0, len(self.units)))
        return y.detach()

    def evaluate(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        """The stage's output, without saving anything."""
        for unit in self.units:
            x = unit(x, micro_batch, run_without_recompute)
        return x

    def _segments(
        self, recomputing: int, level: int
    ) -> Iterator[tuple[int, Sequence[UnitModule], Callable[[str], bool]]]:
        """The segments: the index of the first unit, the units, and whether an operator is recomputed."""

        def segment_key(index: int) -> tuple[str, int | None]:
            strategy = self._strategies[level][index]
            if index >= recomputing or strategy == "none":
                return "none", None
            layer = self.units[index].half_of
            return ("layer", layer) if strategy == "full" and layer is not None else ("unit", index)

        for (kind, _), indices in groupby(range(len(self.units)), segment_key):
            first, *following = indices
            recomputed = recomputed_operators("none") if kind == "none" else self._recomputed[level][first]
            yield first, self.units[first : first + 1 + len(following)], recomputed

    def recompute(self, j: int) -> None:
        """R: recompute all that the forward dropped."""
        for segment in self._states[j].segments:
            segment.restore()

    def backward(self, j: int, gradient: Tensor, *, split: bool) -> Tensor | None:
        """B, or I if `split`: the gradient of the stage's input (None for tokens).

        Segments that R has not recomputed are recomputed right before their backwards.
        """
        state = self._states[j]
        state.units.clear()
        if split:
            self._weight_grads.collect_in(self._ledger if state.counted else None, state.deferred)
        output_gradient: Tensor | None = gradient
        while state.segments:
            segment = state.segments.pop()
            if segment.edge is not None and output_gradient is not None:
                with self.timed(Kind.I if split else Kind.B, segment.first, segment.count):
                    segment.restore()
                    # Backwards use the dtypes of their forwards.
                    with torch.autocast(output_gradient.device.type, enabled=False):
                        torch.autograd.backward([segment.edge], [output_gradient])
            output_gradient = segment.entry.gradient
        self._weight_grads.close()
        if not split:
            del self._states[j]
        return output_gradient

    def backward_weight(self, j: int) -> None:
        """W: compute the weight gradients that I deferred, in its order."""
        state = self._states.pop(j)
        for deferred in state.deferred:
            deferred()
        state.deferred.clear()

    def forget(self) -> None:
        """Drop all micro-batches in flight: there will be no backward."""
        self._states.clear()

    def offload(self, j: int, share: float, allocate: Callable[[int], Tensor]) -> Tensor:
        """O: copy a share of the saved bytes, the first units' first, into one buffer of `allocate(bytes)`.

        Copies wait only for their unit's forward.  The number of saved bytes is known when the forward has returned.
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
        """Release the storages that O has copied, after its copies; partly copied ones keep the rest."""
        copied = self._states[j].copied
        while copied:
            saved, size = copied.pop()
            saved.offload(size)

    def allocate_reload(self, j: int, place: Place | None = None) -> None:
        """Allocate the buffers of `reload`, at planned places or on the current stream, unless they exist."""
        for unit in self._states[j].moved.values():
            for saved, _ in unit:
                saved.allocate_reload(place)

    def has_reload_buffer(self, j: int) -> bool:
        """Tell whether the buffers of `reload` are allocated."""
        return all(saved.has_reload_buffer for unit in self._states[j].moved.values() for saved, _ in unit)

    def reload(self, j: int, buffer: Tensor, *, to_recompute: bool = False, unit_done: UnitDone | None = None) -> None:
        """L: reload what O moved, the last unit first, or, `to_recompute` (before an R), the first unit first.

        With `unit_done`, which is called after every unit, a backward may begin meanwhile: uses of a unit's storages
        wait for them.
        """
        moved = [*self._states[j].moved.values()]
        if to_recompute:
            moved.reverse()
        self._states[j].moved.clear()
        arrivals = [Future[Wait]() for _ in moved]
        if unit_done is not None:
            for number, arrival in enumerate(arrivals):
                _set_arrival(moved[number], arrival)
        try:
            while moved:
                # Popped, so that a concurrent backward can free the unit.
                _reload_unit(moved.pop(), buffer)
                if unit_done is not None:
                    wait = unit_done()
                    arrivals.pop().set_result(wait)
        except BaseException as error:
            # Wake all that wait.
            for arrival in arrivals:
                arrival.set_exception(error)
            raise


_MovedUnit = list[tuple[SavedStorage, int]]
"""The offloaded storages of a unit, each with its offset in O's buffer."""

UnitDone = Callable[[], Wait]
"""Called when all work of a unit is enqueued on the current lane; the result makes another lane wait for it."""
Timed = Callable[[Kind, int, int], AbstractContextManager[None]]
"""Makes the context in which units of an operation run: its kind, the index of the first unit, their number."""

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
    """Resolved when the forward has returned."""
    copied: list[tuple[SavedStorage, int]] = field(default_factory=list)
    """Storages that O has copied, and the number of bytes of each."""
    moved: dict[int, _MovedUnit] = field(default_factory=dict)
    """Offloaded storages by unit, in order."""


@dataclass(frozen=True)
class _UnitSaves:
    """A unit's range of the saves of its segment's tape, and the wait for its forward."""

    tape: Tape
    begin: int
    end: int
    wait: Wait | None


@dataclass
class _Segment:
    """One segment of a micro-batch: its recomputation, its input's gradient, and the edge where its backward starts."""

    restore: Callable[[], None]
    entry: _SegmentInput
    edge: GradientEdge | None
    first: int
    """The index of its first unit."""
    count: int


def _set_arrival(unit: _MovedUnit, arrival: Future[Wait]) -> None:
    """Make uses of a unit's storages wait for their arrival."""
    for saved, _ in unit:
        saved.arrival = arrival


def _reload_unit(unit: _MovedUnit, buffer: Tensor) -> None:
    """Reload a unit's storages from O's buffer."""
    for saved, offset in unit:
        saved.reload(buffer[offset:])


def _no_op() -> None:
    """Restore a segment that dropped nothing."""


class _SegmentInput:
    """The input of a segment's graph, which captures its gradient.  A leaf tensor would keep its storage alive."""

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
    """Choose a share of all bytes to move: storages and bytes of each; only the last is divided."""
    budget = round(sum(s.nbytes for s in saved) * share)
    parts: list[tuple[SavedStorage, int]] = []
    for s in saved:
        size = min(s.nbytes, budget)
        if size:
            parts.append((s, size))
        budget -= size
    return parts
