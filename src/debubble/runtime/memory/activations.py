"""A ledger of saved activations, which counts their bytes on the device exactly.

Autograd's hooks pass every tensor that it saves to `Ledger.save`.  Each storage has one SavedStorage: it is counted
once, and recomputation and offload drop and move it as a whole.  It is freed with its last reference in the graph.
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
    """The saved activations of one device: current bytes, peak, and samples over time."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.bytes = 0
        self.peak = 0
        self.offloaded = 0
        self.offloaded_peak = 0
        self.gathered = 0
        """Bytes of gathered parameters (ZeRO-3)."""
        self.gathered_peak = 0
        self.peak_with_gathered = 0
        """Peak of activations and gathered parameters together."""
        self.samples: list[tuple[float, int]] = []
        self.arena: Arena | None = None
        """The arena that must have capacity for the counted bytes, if there is one."""
        self._is_cuda = self.device.type == "cuda"
        self._excluded: set[int] = set()
        self._known: dict[int, weakref.ref[SavedStorage]] = {}
        # A SavedStorage can be finalized, and uncounted, in any thread that runs the garbage collector.
        self._lock = threading.RLock()

    def start_step(self) -> None:
        """Reset peaks and samples."""
        with self._lock:
            self.peak, self.offloaded_peak = self.bytes, self.offloaded
            self.gathered_peak, self.peak_with_gathered = self.gathered, self.bytes + self.gathered
            self.samples = [(perf_counter(), self.bytes + self.gathered)]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which peaks and samples do not change, and no arena is checked."""
        peaks, samples = (self.peak, self.offloaded_peak, self.gathered_peak, self.peak_with_gathered), self.samples
        arena, self.arena = self.arena, None
        self.samples = []
        try:
            yield
        finally:
            (self.peak, self.offloaded_peak, self.gathered_peak, self.peak_with_gathered), self.samples = peaks, samples
            self.arena = arena

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never count, drop or move these tensors: parameters and buffers."""
        self._excluded.update(map(address, tensors))

    def include(self, tensors: Iterable[Tensor]) -> None:
        """Undo `exclude`, when the tensors' storages are freed and their addresses may be reused."""
        self._excluded.difference_update(map(address, tensors))

    def excludes(self, tensor: Tensor) -> bool:
        """Tell whether the tensor is excluded, empty, or on another device (kernels save a random seed on the host)."""
        data_ptr = address(tensor)
        return not data_ptr or data_ptr in self._excluded or tensor.is_cuda != self._is_cuda

    def save(self, tensor: Tensor) -> SavedTensor:
        """Keep the tensor's storage, and count it, while the result is alive; `unpack` returns the tensor."""
        # A hot path, called for every saved tensor of every micro-batch.
        storage = tensor.untyped_storage()
        data_ptr: int = storage.data_ptr()
        ref = self._known.get(data_ptr)
        known = None if ref is None else ref()
        if known is not None:
            known.transient = False
            return SavedView(known, tensor)
        # Keeping the tensor itself would make a reference cycle with the graph that keeps the result.
        detached = tensor.detach()
        if not data_ptr or data_ptr in self._excluded or tensor.is_cuda != self._is_cuda:
            return detached
        saved = SavedStorage(self)
        saved.save(storage, data_ptr)
        saved.original, saved.version = detached, detached._version
        return saved

    def expect(self, data_ptr: int) -> SavedStorage:
        """Register a storage at this address that recomputation will restore."""
        saved = SavedStorage(self)
        saved.transient = True
        self.register(data_ptr, saved)
        return saved

    def find(self, data_ptr: int) -> SavedStorage | None:
        """The saved storage at this address; None if there is none."""
        known = self._known.get(data_ptr)
        return None if known is None else known()

    def register(self, data_ptr: int, saved: SavedStorage) -> None:
        """Register `saved` for the storage at this address."""
        self._known[data_ptr] = weakref.ref(saved)

    def unregister(self, data_ptr: int, saved: SavedStorage) -> None:
        """Unregister `saved` from this address."""
        if self.find(data_ptr) is saved:
            del self._known[data_ptr]

    def count(self, change: int, owner: Owner | None = None) -> None:
        """Add to the bytes on the device.  Raises ArenaError if they exceed the arena's capacity."""
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

    def count_offloaded(self, change: int) -> None:
        """Add to the offloaded bytes."""
        with self._lock:
            self.offloaded += change
            self.offloaded_peak = max(self.offloaded_peak, self.offloaded)


Wait = Callable[[], None]
"""Makes the current lane wait for another lane."""


class SavedStorage:
    """A storage that the backward needs, on the device or offloaded."""

    # One is made for every saved tensor, so rarely used attributes have defaults in the class.
    nbytes = 0
    """Bytes on the device."""
    original: Tensor | None = None
    """The first saved tensor on the storage, until the storage is dropped."""
    version = 0
    """The original's version when it was saved; with hooks, autograd does not check for changes in place."""
    transient = False
    """True if recomputation needs it only as an input of later operators: as in a forward, it is not counted."""
    arrival: Future[Wait] | None = None
    """During a reload: the future of the wait for its copy.  None: no wait is needed."""
    _storage: torch.UntypedStorage | None = None
    _data_ptr = 0
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
        """The storage on the device, after its arrival.  Raises AssertionError if it is dropped or offloaded."""
        if self.arrival is not None:
            self.arrival.result()()
            self.arrival = None
        assert self._storage is not None, "a saved activation is used while it is not on the device"
        return self._storage

    def save(self, storage: torch.UntypedStorage, data_ptr: int) -> None:
        """Keep a storage, and count it."""
        nbytes = 0 if self.transient else storage.nbytes()
        self._ledger.count(nbytes, self._owner)
        self._storage, self._data_ptr, self.nbytes = storage, data_ptr, nbytes
        self._ledger.register(data_ptr, self)

    def drop(self) -> None:
        """Release the storage."""
        if self._storage is not None:
            self._uncount()
            if self.original is not None:
                self.check_version(self.version)
                self._geometry = geometry(self.original)
            self._storage, self.original, self.nbytes = None, None, 0

    @property
    def tensor(self) -> Tensor:
        """The first saved tensor on the storage."""
        if self.original is not None:
            self.check_version(self.version)
            return self.original
        assert self._geometry is not None
        return self.view(*self._geometry)

    def check_version(self, version: int) -> None:
        """Raise InputError if the original was changed in place since this version was saved."""
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

    def copy_to(self, buffer: Tensor) -> None:
        """Copy the first bytes to fill a buffer."""
        buffer.copy_(as_bytes(self.storage)[: len(buffer)], non_blocking=True)

    def offload(self, moved: int) -> None:
        """Release the storage after its first `moved` bytes were copied, and keep a copy of the rest."""
        content = as_bytes(self.storage)
        rest = content[moved:].clone() if moved < len(content) else None
        self._moved = moved, len(content)
        self.drop()
        if rest is not None:
            self._rest = rest
            self._ledger.count(rest.nbytes, self._owner)
        self._ledger.count_offloaded(moved)

    @property
    def has_reload_buffer(self) -> bool:
        """True if the buffer of `reload` is allocated."""
        return self._reload_buffer is not None

    def allocate_reload(self, place: Place | None = None) -> Tensor:
        """Allocate the buffer of `reload`, at a planned place or on the current stream, and copy the rest into it."""
        if self._reload_buffer is None:
            moved, size = self._moved
            # A partly offloaded storage is no tensor of the address plan, as its rest has other addresses.
            placed = place(size) if place is not None and moved == size else None
            if placed is None:
                placed = torch.empty(size, dtype=torch.uint8, device=self._ledger.device)
            self._reload_buffer = placed
            if self._rest is not None:
                self._reload_buffer[moved:].copy_(self._rest)
        return self._reload_buffer

    def reload(self, source: Tensor) -> int:
        """Restore the storage, its first bytes from `source`, and return their number."""
        moved, buffer = self._moved[0], self.allocate_reload()
        buffer[:moved].copy_(source[:moved], non_blocking=True)
        self._uncount_offloaded()
        self._reload_buffer = None
        self.save(buffer.untyped_storage(), address(buffer))
        return moved

    def _uncount_offloaded(self) -> None:
        """Stop counting the offloaded bytes and the rest."""
        self._ledger.count_offloaded(-self._moved[0])
        if self._rest is not None:
            self._ledger.count(-self._rest.nbytes, self._owner)
        self._moved, self._rest = (0, 0), None

    def _uncount(self) -> None:
        self._ledger.unregister(self._data_ptr, self)
        self._ledger.count(-self.nbytes, self._owner)

    def __del__(self) -> None:
        if self._storage is not None:
            self._uncount()
        if self._moved[1]:
            self._uncount_offloaded()


def address(tensor: Tensor) -> int:
    """Address of the tensor's storage; 0 if it is empty."""
    data_ptr: int = tensor.untyped_storage().data_ptr()
    return data_ptr


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class SavedView:
    """Another tensor on a saved storage."""

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
"""A tensor's view of its storage: dtype, offset, size, stride."""


def geometry(tensor: Tensor) -> Geometry:
    """The tensor's view of its storage."""
    return tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()


SavedTensor = SavedStorage | SavedView | Tensor
"""A saved tensor: the first on its storage, another one, or an excluded tensor itself."""


def unpack(saved: SavedTensor) -> Tensor:
    """The saved tensor, detached."""
    return saved if isinstance(saved, Tensor) else saved.tensor
