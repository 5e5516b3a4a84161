"""A ledger of saved activations, which counts their bytes on the device exactly.

Autograd hands every tensor that it saves to `Ledger.save`.  Every storage has one SavedStorage: it is counted once, and
is what recomputation drops and offload moves.  When nothing that autograd keeps refers to it any more, it is free.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from debubble.ir import InputError
from debubble.runtime.memory.arena import GATHERED, Arena, Owner, Place


class Ledger:
    """The saved activations of one device: bytes now, the peak, and when they changed."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.bytes = 0
        self.peak = 0
        self.elsewhere = 0
        self.elsewhere_peak = 0
        self.gathered = 0
        """Bytes of parameters that are gathered now."""
        self.gathered_peak = 0
        self.peak_with_gathered = 0
        """Most bytes of activations and gathered parameters together."""
        self.samples: list[tuple[float, int]] = []
        self.arena: Arena | None = None
        """The arena that has to have room for what is counted."""
        self._is_cuda = self.device.type == "cuda"
        self._excluded: set[int] = set()
        self._known: dict[int, weakref.ref[SavedStorage]] = {}
        # A SavedStorage can die, and count itself out, wherever the garbage collector runs.
        self._lock = threading.RLock()

    def start_step(self) -> None:
        """Forget the peaks and samples of the step before."""
        with self._lock:
            self.peak, self.elsewhere_peak = self.bytes, self.elsewhere
            self.gathered_peak, self.peak_with_gathered = self.gathered, self.bytes + self.gathered
            self.samples = [(perf_counter(), self.bytes + self.gathered)]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave peaks and samples as they are, and ask no arena."""
        peaks, samples = (self.peak, self.elsewhere_peak, self.gathered_peak, self.peak_with_gathered), self.samples
        arena, self.arena = self.arena, None
        self.samples = []
        try:
            yield
        finally:
            (self.peak, self.elsewhere_peak, self.gathered_peak, self.peak_with_gathered), self.samples = peaks, samples
            self.arena = arena

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never count, drop or move these: parameters and buffers."""
        self._excluded.update(map(address, tensors))

    def include(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors at these addresses as activations again, as their storages are freed."""
        self._excluded.difference_update(map(address, tensors))

    def excludes(self, tensor: Tensor) -> bool:
        """Tell whether the tensor's storage is no activation of this device.

        An empty tensor has none, and kernels keep a random seed on the host.
        """
        at = address(tensor)
        return not at or at in self._excluded or tensor.is_cuda != self._is_cuda

    def save(self, tensor: Tensor) -> SavedTensor:
        """Keep the tensor's storage, and count it, as long as the result lives; `unpack` gives the tensor back."""
        # This is called for every saved tensor of every micro-batch: it looks nothing up twice.
        storage = tensor.untyped_storage()
        at: int = storage.data_ptr()
        ref = self._known.get(at)
        known = None if ref is None else ref()
        if known is not None:
            known.transient = False
            return SavedView(known, tensor)
        # Keeping the tensor instead of a detached one would make a cycle with the graph that keeps the answer.
        detached = tensor.detach()
        if not at or at in self._excluded or tensor.is_cuda != self._is_cuda:
            return detached
        saved = SavedStorage(self)
        saved.save(storage, at)
        saved.original, saved.version = detached, detached._version
        return saved

    def expect(self, at: int) -> SavedStorage:
        """Register a storage at this address that recomputation will bring back."""
        saved = SavedStorage(self)
        saved.transient = True
        self.know(at, saved)
        return saved

    def find(self, at: int) -> SavedStorage | None:
        """The saved storage at this address, if there is one."""
        known = self._known.get(at)
        return None if known is None else known()

    def know(self, at: int, saved: SavedStorage) -> None:
        """Let `saved` stand for the storage at this address from now on."""
        self._known[at] = weakref.ref(saved)

    def forget(self, at: int, saved: SavedStorage) -> None:
        """Let `saved` no longer stand for the storage at this address."""
        if self.find(at) is saved:
            del self._known[at]

    def count(self, change: int, owner: Owner | None = None) -> None:
        """Add to the bytes on the device.  Raises ArenaError if an arena has no room for them."""
        with self._lock:
            if self.arena is not None and owner is not None:
                self.arena.count(owner, change)
            self.bytes += change
            if self.bytes > self.peak:
                self.peak = self.bytes
            self._sample()

    def count_gathered(self, change: int) -> None:
        """Add to the bytes of gathered parameters."""
        with self._lock:
            if self.arena is not None:
                self.arena.count(GATHERED, change)
            self.gathered += change
            self.gathered_peak = max(self.gathered_peak, self.gathered)
            self._sample()

    def _sample(self) -> None:
        both = self.bytes + self.gathered
        if both > self.peak_with_gathered:
            self.peak_with_gathered = both
        self.samples.append((perf_counter(), both))

    def count_elsewhere(self, change: int) -> None:
        """Add to the bytes that offload holds elsewhere."""
        with self._lock:
            self.elsewhere += change
            self.elsewhere_peak = max(self.elsewhere_peak, self.elsewhere)


Wait = Callable[[], None]
"""Lets the current lane continue only after a moment of another one."""


class SavedStorage:
    """A storage that the backward needs, on the device or elsewhere."""

    # Made for every saved tensor: what most never have is the class's.
    nbytes = 0
    """Bytes on the device."""
    original: Tensor | None = None
    """The tensor that was saved first, while its storage is the original one."""
    version = 0
    """The original's version when it was saved: autograd leaves it to hooks to see what changed in place since."""
    transient = False
    """True if recomputation makes it for the operators after it alone: as in a forward, it is not counted."""
    arrival: Future[Wait] | None = None
    """While it is on its way back: the wait for it, once the copy is under way.  None: nobody has to wait."""
    _storage: torch.UntypedStorage | None = None
    _at = 0
    _geometry: Geometry | None = None
    _moved = 0, 0
    _rest: Tensor | None = None
    _reload_buffer: Tensor | None = None
    _owner: Owner | None = None

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        if ledger.arena is not None:
            self._owner = ledger.arena.owner

    @property
    def on_device(self) -> bool:
        """True if the storage is on the device."""
        return self._storage is not None

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage on the device, after its arrival.  Raises AssertionError while it is elsewhere."""
        if self.arrival is not None:
            self.arrival.result()()
            self.arrival = None
        assert self._storage is not None, "a saved activation is used while it is not on the device"
        return self._storage

    def save(self, storage: torch.UntypedStorage, at: int) -> None:
        """Keep this storage, and count it."""
        nbytes = 0 if self.transient else storage.nbytes()
        self._ledger.count(nbytes, self._owner)
        self._storage, self._at, self.nbytes = storage, at, nbytes
        self._ledger.know(at, self)

    def drop(self) -> None:
        """Let the storage go."""
        if self._storage is not None:
            self._count_out()
            if self.original is not None:
                self.check_version(self.version)
                self._geometry = geometry(self.original)
            self._storage, self.original, self.nbytes = None, None, 0

    @property
    def tensor(self) -> Tensor:
        """The tensor that was saved first."""
        if self.original is not None:
            self.check_version(self.version)
            return self.original
        assert self._geometry is not None
        return self.view(*self._geometry)

    def check_version(self, version: int) -> None:
        """Raise InputError if the original has changed in place since a tensor of that version was saved."""
        if self.original is not None and self.original._version != version:
            raise InputError(
                "A tensor that the backward needs was changed in place after an operator had saved it: use operators"
                " that are not in place there (x + 1 rather than x.add_(1))."
            )

    def view(self, dtype: torch.dtype, offset: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
        """A tensor on the storage."""
        original = self.original
        if original is not None and original.dtype == dtype:
            same = original.size() == size and original.stride() == stride and original.storage_offset() == offset
            return original if same else original.as_strided(size, stride, offset)
        storage = self.storage
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, offset, size, stride)
        return tensor

    def copy_to(self, elsewhere: Tensor) -> None:
        """Copy the first bytes to `elsewhere`: as many as it has."""
        elsewhere.copy_(as_bytes(self.storage)[: len(elsewhere)], non_blocking=True)

    def offload(self, moved: int) -> None:
        """Let the storage go, whose first bytes were moved, and keep the rest in a tensor of the current stream."""
        content = as_bytes(self.storage)
        rest = content[moved:].clone() if moved < len(content) else None
        self._moved = moved, len(content)
        self.drop()
        if rest is not None:
            self._rest = rest
            self._ledger.count(rest.nbytes, self._owner)
        self._ledger.count_elsewhere(moved)

    @property
    def has_reload_buffer(self) -> bool:
        """True if what `reload` fills is there."""
        return self._reload_buffer is not None

    def allocate_reload(self, place: Place | None = None) -> Tensor:
        """The storage that `reload` fills, with the rest in its place: of the current stream, unless it is there."""
        if self._reload_buffer is None:
            moved, size = self._moved
            # The rest has addresses of its own: a storage that left in part is no tensor of the address plan.
            placed = place(size) if place is not None and moved == size else None
            if placed is None:
                placed = torch.empty(size, dtype=torch.uint8, device=self._ledger.device)
            self._reload_buffer = placed
            if self._rest is not None:
                self._reload_buffer[moved:].copy_(self._rest)
        return self._reload_buffer

    def reload(self, elsewhere: Tensor) -> int:
        """Bring the storage back, its first bytes from `elsewhere`, into its buffer; returns how many those were."""
        moved, buffer = self._moved[0], self.allocate_reload()
        buffer[:moved].copy_(elsewhere[:moved], non_blocking=True)
        self._return()
        self._reload_buffer = None
        self.save(buffer.untyped_storage(), address(buffer))
        return moved

    def _return(self) -> None:
        """Stop counting the bytes that were moved elsewhere and those that stayed as the rest."""
        self._ledger.count_elsewhere(-self._moved[0])
        if self._rest is not None:
            self._ledger.count(-self._rest.nbytes, self._owner)
        self._moved, self._rest = (0, 0), None

    def _count_out(self) -> None:
        self._ledger.forget(self._at, self)
        self._ledger.count(-self.nbytes, self._owner)

    def __del__(self) -> None:
        if self._storage is not None:
            self._count_out()
        if self._moved[1]:
            self._return()


def address(tensor: Tensor) -> int:
    """Address of the tensor's storage; 0 if it is empty."""
    at: int = tensor.untyped_storage().data_ptr()
    return at


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class SavedView:
    """A further tensor on a saved storage."""

    __slots__ = ("_geometry", "_version", "saved")

    def __init__(self, saved: SavedStorage, tensor: Tensor) -> None:
        self.saved = saved
        self._geometry, self._version = geometry(tensor), tensor._version

    @property
    def tensor(self) -> Tensor:
        """The tensor, detached."""
        self.saved.check_version(self._version)
        return self.saved.view(*self._geometry)


Geometry = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""A tensor's place on its storage: dtype, offset, size, stride."""


def geometry(tensor: Tensor) -> Geometry:
    """The tensor's place on its storage."""
    return tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()


SavedTensor = SavedStorage | SavedView | Tensor
"""A saved tensor: a storage's first, another one on it, or a parameter or buffer itself."""


def unpack(kept: SavedTensor) -> Tensor:
    """The saved tensor, detached."""
    return kept if isinstance(kept, Tensor) else kept.tensor
