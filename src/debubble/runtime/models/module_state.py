"""The state that a module's result depends on besides input and parameters: random generators and buffers.

While a module runs, torch's generators have a seed of the micro-batch.  A recomputation temporarily restores Python's
and numpy's generators, and buffers that the forward has changed, to their state before the forward.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from debubble.ir import InputError

CHECKED_CALLS = 4
"""Number of first calls of a module whose recomputation is compared with the forward."""
TOLERANCE = 1e-2
"""Largest difference of a recomputation, relative to the result's norm; rounding in bf16 is below it."""

_GENERATORS = threading.RLock()  # ranks that are threads share them


class seeded:  # noqa: N801 - a context like torch.no_grad; a class takes half the time of a generator
    """Context in which torch's generators have a seed; their state is restored afterwards."""

    __slots__ = ("_generators", "_seed", "_states")

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators: tuple[torch.Generator, ...] = (torch.default_generator,)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators += (torch.cuda.default_generators[index],)

    def __enter__(self) -> None:
        _GENERATORS.acquire()
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        _GENERATORS.release()


class ModuleState:
    """The state of a module: its buffers, and the generators of the process."""

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        self._buffers = [
            (path, owner, name)
            for path, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._changed: set[str] | None = None
        """Names of the buffers that a forward changes; None before the first forward."""
        self._unchecked = CHECKED_CALLS

    def remember(self) -> ModuleMemory:
        """Save the state before a forward."""
        buffers = []
        for path, owner, name in self._buffers:
            buffer = owner._buffers[name]
            assert buffer is not None
            full_name = f"{path}.{name}" if path else name
            copied = buffer.clone() if self._changed is None or full_name in self._changed else None
            buffers.append(_Buffer(full_name, owner, name, buffer, buffer._version, copied))
        check = self._unchecked > 0
        self._unchecked -= check
        numpy = sys.modules.get("numpy")
        return ModuleMemory(
            self, buffers, random.getstate(), None if numpy is None else numpy.random.get_state(), checked=check
        )

    def learn(self, buffers: list[_Buffer]) -> None:
        """Record which buffers a forward has changed.

        Raises:
            InputError: It has changed a buffer that the first forward did not change.
        """
        changed = {buffer.name for buffer in buffers if buffer.changed}
        if self._changed is None:
            self._changed = changed
        elif late := changed - self._changed:
            raise InputError(
                f"{self._name} changes its buffer '{min(late)}' in some forwards alone, so it cannot be computed again:"
                " let the plan recompute nothing there."
            )

    def check(self, first: Tensor, recomputed: Tensor) -> None:
        """Compare the fingerprints of a forward and of its recomputation; raises InputError if they differ."""
        # NaN is a valid result.
        if not torch.allclose(first[0], recomputed[0], rtol=0, atol=TOLERANCE * float(first[1]), equal_nan=True):
            raise InputError(
                f"{self._name} computes something else when it is called again with the same input, generators and"
                " buffers, so it cannot be recomputed: let the plan recompute nothing there, or make what its forward"
                " changes a buffer."
            )


@dataclass
class _Buffer:
    """A buffer before a forward."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor
    version: int
    copied: Tensor | None

    @property
    def changed(self) -> bool:
        """True if it has changed since; values are compared, as some kernels do not increment the version."""
        now = self.owner._buffers[self.attribute]
        if now is None or now is not self.tensor or now._version != self.version:
            return True
        return self.copied is not None and not torch.equal(now, self.copied)


@dataclass
class ModuleMemory:
    """The state before one forward."""

    _state: ModuleState
    _buffers: list[_Buffer]
    _python: object
    _numpy: object
    checked: bool
    """True if the recomputation is compared with the forward."""
    _fingerprint: Tensor | None = None
    _ran: bool = field(default=False)

    def end_run(self, result: Tensor) -> None:
        """After the forward, record what it changed; after a recomputation, compare the results."""
        if not self._ran:
            self._ran = True
            self._state.learn(self._buffers)
            self._buffers = [buffer for buffer in self._buffers if buffer.changed]
            self._fingerprint = _fingerprint(result) if self.checked else None
        elif self._fingerprint is not None:
            self._state.check(self._fingerprint, _fingerprint(result))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Context with the state before the forward; restores the present state afterwards."""
        numpy = sys.modules.get("numpy") if self._numpy is not None else None
        present = [(b, b.owner._buffers[b.attribute]) for b in self._buffers]
        python_now, numpy_now = random.getstate(), None if numpy is None else numpy.random.get_state()
        for buffer in self._buffers:
            buffer.owner._buffers[buffer.attribute] = buffer.copied
        random.setstate(self._python)  # type: ignore[arg-type]
        if numpy is not None:
            numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            for buffer, now in present:
                buffer.owner._buffers[buffer.attribute] = now
            random.setstate(python_now)
            if numpy is not None:
                numpy.random.set_state(numpy_now)


@torch.no_grad()
def _fingerprint(result: Tensor) -> Tensor:
    """Two numbers that identify a result: its product with a sine wave, and its norm."""
    values = result.detach().flatten().double()
    wave = torch.arange(len(values), dtype=torch.float64, device=values.device).sin_()
    return torch.stack((values @ wave, values.norm()))
