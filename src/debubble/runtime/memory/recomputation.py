"""Recomputation by operator: a tape records the forward of a segment of units and one micro-batch.

A unit calls every operator through its tape.  An operator that is to be recomputed is recorded: the results and
internals that autograd saves are dropped at once (their SavedStorages remain, empty), and its inputs are saved instead.
`restore` runs the recorded operators again and fills the storages that the backward needs; operators whose results are
not needed do not run again.
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
"""Makes a context in which a function has the state of its first run."""


@runtime_checkable
class Stateful(Protocol):
    """A function whose result depends on state besides its inputs: random generators, buffers that it changes."""

    def remember(self) -> PutBack:
        """Save the state before the first run; the result makes the context of a second run."""


class Operators(Protocol):
    """How a unit calls its operators: `op(name, function, *tensors)` returns `function(*tensors)`."""

    def __call__(self, name: str, function: Function, *inputs: Tensor) -> Any:
        """Return `function(*inputs)`, as the operator `name`."""


def run_without_recompute(name: str, function: Function, *inputs: Tensor) -> Any:
    """Call the operator: plain autograd."""
    return function(*inputs)


class Tape:
    """Runs the units' operators, and records those for which `recomputed(name)` is true."""

    def __init__(self, ledger: Ledger, recomputed: Callable[[str], bool]) -> None:
        self._ledger = ledger
        self._recomputed = recomputed
        self._records: list[_Record] = []
        self._recording: _Record | None = None
        self._saved: list[weakref.ref[SavedStorage]] = []
        # Keeps tensors alive while their addresses identify storages.
        self._expected: list[tuple[Tensor, SavedStorage]] = []

    def __call__(self, name: str, function: Function, *inputs: Tensor) -> Any:
        """Return `function(*inputs)`, and record the call if the operator is recomputed."""
        if not self._recomputed(name):
            return function(*inputs)
        saved_inputs, requires_grad = [self._save_input(t) for t in inputs], [t.requires_grad for t in inputs]
        put_back = function.remember() if isinstance(function, Stateful) else nullcontext
        record = self._recording = _Record(function, saved_inputs, requires_grad, put_back)
        try:
            results = function(*inputs)
        finally:
            self._recording = None
        self._expected.extend(record.expect_results(self._ledger, _tensors(results)))
        self._records.append(record)
        return results

    def watch(self) -> saved_tensors_hooks:
        """Context of saved-tensor hooks in which the units' forwards run."""
        return saved_tensors_hooks(self._pack, unpack)

    def finish(self) -> None:
        """End the forward: discard records that no backward needs."""
        while self._expected:
            result, saved = self._expected.pop()
            self._ledger.unregister(address(result), saved)
            del saved
        for index in reversed(range(len(self._records))):
            if not self._records[index].needed:
                del self._records[index]

    def restore(self) -> None:
        """Recompute everything that was dropped and is needed."""
        # A record is released once it has run, with what only it needs.
        self._records.reverse()
        while self._records:
            self._records.pop().replay()

    @property
    def saves(self) -> int:
        """The number of saves so far, including repeated saves of a storage."""
        return len(self._saved)

    def saved(self, begin: int = 0, end: int | None = None) -> list[SavedStorage]:
        """The storages that the backward still needs, of all saves or of a range of them."""
        return [saved for ref in self._saved[begin:end] if (saved := ref()) is not None]

    def _save_input(self, tensor: Tensor) -> SavedTensor:
        """Save an input of a record, unless an earlier record recomputes it."""
        known = self._ledger.find(address(tensor))
        return self._save(tensor) if known is None or known.on_device else SavedView(known, tensor)

    def _save(self, tensor: Tensor) -> SavedTensor:
        saved = self._ledger.save(tensor)
        if isinstance(saved, SavedStorage):
            self._saved.append(weakref.ref(saved))
        return saved

    def _pack(self, tensor: Tensor) -> SavedTensor:
        if self._recording is not None and self._recording.makes(self._ledger, tensor):
            return self._recording.pack(self._ledger, tensor)
        return self._save(tensor)


class _Record:
    """One recomputed operator: its inputs, and those of its results and internals that the backward may need."""

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
        """Tell whether a tensor that is saved while the operator runs is a result or internal, not an input."""
        data_ptr = address(tensor)
        known = ledger.find(data_ptr)
        is_local = known is None or any(ref is not None and ref() is known for ref in self._packs)
        if ledger.excludes(tensor) or not is_local:
            self._packs.append(None)
            return False
        return True

    def pack(self, ledger: Ledger, tensor: Tensor) -> SavedView:
        """Replace a result or internal by an empty saved storage."""
        data_ptr = address(tensor)
        known = ledger.find(data_ptr)
        if known is None:
            known = ledger.expect(data_ptr)
            self._internals.append(tensor.detach())
        self._packs.append(weakref.ref(known))
        known.transient = False
        return SavedView(known, tensor)

    def expect_results(self, ledger: Ledger, results: list[Tensor]) -> list[tuple[Tensor, SavedStorage]]:
        """Register the operator's results, and unregister its internals."""
        expected: dict[int, tuple[Tensor, SavedStorage]] = {}
        for result in results:
            data_ptr = address(result)
            known = ledger.find(data_ptr)
            if known is None and not ledger.excludes(result):
                known = ledger.expect(data_ptr)
            if known is None or known.on_device:
                self._results.append(None)
            else:
                self._results.append(weakref.ref(known))
                expected[data_ptr] = result.detach(), known
        for internal in self._internals:
            data_ptr = address(internal)
            saved = ledger.find(data_ptr)
            if saved is not None and data_ptr not in expected:
                ledger.unregister(data_ptr, saved)
        self._internals.clear()
        return list(expected.values())

    def replay(self) -> None:
        """Run the operator again, and fill the storages that are needed."""
        if not self.needed:
            return
        packs = iter(self._packs)

        def fill(tensor: Tensor) -> None:
            _fill(next(packs), tensor)

        inputs = [unpack(k).detach().requires_grad_(r) for k, r in zip(self._inputs, self._requires_grad, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(fill, _no_backward), self._put_back():
            results = _tensors(self._function(*inputs))
        for ref, result in zip(self._results, results, strict=True):
            _fill(ref, result)


def _fill(ref: weakref.ref[SavedStorage] | None, tensor: Tensor) -> None:
    saved = None if ref is None else ref()
    if saved is not None and not saved.on_device:
        saved.save(tensor.untyped_storage(), address(tensor))


def _no_backward(_: object) -> Tensor:
    raise AssertionError("a recomputation has no backward of its own")


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for result in results for t in _tensors(result)]
