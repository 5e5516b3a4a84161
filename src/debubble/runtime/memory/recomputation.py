"""The tape of a segment of units and one micro-batch: what its forward leaves, and how to bring back what was dropped.

A unit calls every operator through its tape.  An operator that is to be recomputed is recorded: what autograd saves of
its results and internals is dropped at once (its SavedStorage stays, empty), and its inputs are kept instead.
`restore` runs the recorded operators again and fills exactly what the backward misses; operators of whose results
nothing is missing do not run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from debubble.runtime.memory.activations import Ledger, SavedStorage, SavedTensor, SavedView, address, unpack

Function = Callable[..., Any]


PutBack = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a function finds the state that it had before."""


@runtime_checkable
class Stateful(Protocol):
    """A function whose result depends on more than its inputs: random generators, buffers that it changes."""

    def remember(self) -> PutBack:
        """Note the state before a first run; a second run happens in the context of the answer."""


class Operators(Protocol):
    """The way a unit calls its operators: `op(name, function, *tensors)` returns `function(*tensors)`."""

    def __call__(self, name: str, function: Function, *inputs: Tensor) -> Any:
        """Return `function(*inputs)`, computed as the operator `name`."""


def run_without_recompute(name: str, function: Function, *inputs: Tensor) -> Any:
    """Call the operator: plain autograd."""
    return function(*inputs)


class Tape:
    """Runs the units' operators; those for which `recomputed` says so are dropped and recorded."""

    def __init__(self, ledger: Ledger, recomputed: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._recomputed = recomputed
        self._records: list[_Record] = []
        self._recording: _Record | None = None
        self._saved: list[weakref.ref[SavedStorage]] = []
        # Addresses stand for storages only while these tensors live.
        self._expected: list[tuple[Tensor, SavedStorage]] = []

    def __call__(self, name: str, function: Function, *inputs: Tensor) -> Any:
        """Return `function(*inputs)`, and record the call if the operator is recomputed."""
        if not self._recomputed(name):
            return function(*inputs)
        kept, requires_grad = [self._input(t) for t in inputs], [t.requires_grad for t in inputs]
        put_back = function.remember() if isinstance(function, Stateful) else nullcontext
        record = self._recording = _Record(function, kept, requires_grad, put_back)
        try:
            results = function(*inputs)
        finally:
            self._recording = None
        self._expected.extend(record.expect_results(self._ledger, _tensors(results)))
        self._records.append(record)
        return results

    def watch(self) -> saved_tensors_hooks:
        """Context in which the units' forwards run."""
        return saved_tensors_hooks(self._pack, unpack)

    def finish(self) -> None:
        """The forward is over: forget what no backward will ask for."""
        while self._expected:
            result, saved = self._expected.pop()
            self._ledger.forget(address(result), saved)
            del saved
        for index in reversed(range(len(self._records))):
            if not self._records[index].needed:
                del self._records[index]

    def restore(self) -> None:
        """Bring back everything that was dropped."""
        # A record goes once it has run, and with it what only it has asked for.
        self._records.reverse()
        while self._records:
            self._records.pop().replay()

    @property
    def saves(self) -> int:
        """The number of saves so far; a storage counts as often as it was saved."""
        return len(self._saved)

    def saved(self, begin: int = 0, end: int | None = None) -> list[SavedStorage]:
        """The storages that the backward still needs, of those saves: all, or from one number of saves to another."""
        return [saved for ref in self._saved[begin:end] if (saved := ref()) is not None]

    def _input(self, tensor: Tensor) -> SavedTensor:
        """Keep what a record computes from, unless a record before it brings that back."""
        known = self._ledger.find(address(tensor))
        return self._keep(tensor) if known is None or known.on_device else SavedView(known, tensor)

    def _keep(self, tensor: Tensor) -> SavedTensor:
        kept = self._ledger.save(tensor)
        if isinstance(kept, SavedStorage):
            self._saved.append(weakref.ref(kept))
        return kept

    def _pack(self, tensor: Tensor) -> SavedTensor:
        if self._recording is not None and self._recording.makes(self._ledger, tensor):
            return self._recording.pack(self._ledger, tensor)
        return self._keep(tensor)


class _Record:
    """One operator that runs again: its inputs, and what it makes that the backward asks for."""

    def __init__(
        self, function: Function, inputs: list[SavedTensor], requires_grad: list[bool], put_back: PutBack
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._requires_grad = requires_grad
        self._put_back = put_back
        self._packs: list[weakref.ref[SavedStorage] | None] = []
        self._results: list[weakref.ref[SavedStorage] | None] = []
        self._internals: list[Tensor] = []

    @property
    def needed(self) -> bool:
        """True if the backward still needs one of its results or internals."""
        return any(ref is not None and ref() is not None for ref in (*self._packs, *self._results))

    def makes(self, ledger: Ledger, tensor: Tensor) -> bool:
        """Tell whether a tensor saved while the operator runs is a result or internal of it, not an input."""
        at = address(tensor)
        known = ledger.find(at)
        mine = known is None or any(ref is not None and ref() is known for ref in self._packs)
        if ledger.excludes(tensor) or not mine:
            self._packs.append(None)
            return False
        return True

    def pack(self, ledger: Ledger, tensor: Tensor) -> SavedView:
        """Stand for such a tensor without holding it."""
        at = address(tensor)
        known = ledger.find(at)
        if known is None:
            known = ledger.expect(at)
            self._internals.append(tensor.detach())
        self._packs.append(weakref.ref(known))
        known.transient = False
        return SavedView(known, tensor)

    def expect_results(self, ledger: Ledger, results: list[Tensor]) -> list[tuple[Tensor, SavedStorage]]:
        """The operator has run: note its results, and forget the addresses of its internals."""
        expected: dict[int, tuple[Tensor, SavedStorage]] = {}
        for result in results:
            at = address(result)
            known = ledger.find(at)
            if known is None and not ledger.excludes(result):
                known = ledger.expect(at)
            if known is None or known.on_device:
                self._results.append(None)
            else:
                self._results.append(weakref.ref(known))
                expected[at] = result.detach(), known
        for internal in self._internals:
            at = address(internal)
            saved = ledger.find(at)
            if saved is not None and at not in expected:
                ledger.forget(at, saved)
        self._internals.clear()
        return list(expected.values())

    def replay(self) -> None:
        """Run again, and hold what is missing."""
        if not self.needed:
            return
        packs = iter(self._packs)

        def fill(tensor: Tensor) -> None:
            _fill(next(packs), tensor)

        inputs = [unpack(k).detach().requires_grad_(r) for k, r in zip(self._inputs, self._requires_grad, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(fill, _never), self._put_back():
            results = _tensors(self._function(*inputs))
        for ref, result in zip(self._results, results, strict=True):
            _fill(ref, result)


def _fill(ref: weakref.ref[SavedStorage] | None, tensor: Tensor) -> None:
    saved = None if ref is None else ref()
    if saved is not None and not saved.on_device:
        saved.save(tensor.untyped_storage(), address(tensor))


def _never(_: object) -> Tensor:
    raise AssertionError("a recomputation has no backward of its own")


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for result in results for t in _tensors(result)]
