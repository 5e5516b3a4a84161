"""Which device holds which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from debubble.errors import InputError


@dataclass(frozen=True)
class Placement:
    """`device_of[s]` is the device of stage s.  Every device holds at least one stage."""

    device_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.device_of:
            raise InputError("A placement needs at least one stage.")
        if set(self.device_of) != set(range(len(set(self.device_of)))):
            raise InputError(f"Every device from 0 up must hold a stage; the placement is {list(self.device_of)}.")

    @staticmethod
    def linear(devices: int) -> Placement:
        """One stage per device."""
        return Placement.looped(devices)

    @staticmethod
    def looped(devices: int, chunks: int = 1) -> Placement:
        """Stage s on device s mod p (Megatron's interleaving)."""
        _check(devices, chunks)
        return Placement(tuple(s % devices for s in range(devices * chunks)))

    @staticmethod
    def v_shape(devices: int, chunks: int = 2) -> Placement:
        """Zigzag: down the devices with the even chunks, up with the odd ones."""
        _check(devices, chunks)
        down = tuple(range(devices))
        return Placement(tuple(d for c in range(chunks) for d in (down if c % 2 == 0 else down[::-1])))

    @staticmethod
    def of(device_of: Sequence[int]) -> Placement:
        """An explicit list."""
        return Placement(tuple(device_of))

    @property
    def stages(self) -> int:
        return len(self.device_of)

    @cached_property
    def devices(self) -> int:
        return max(self.device_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Per device, its stages in model order; the k-th is its chunk k."""
        held: list[list[int]] = [[] for _ in range(self.devices)]
        for stage, device in enumerate(self.device_of):
            held[device].append(stage)
        return tuple(map(tuple, held))

    @property
    def chunks(self) -> int:
        """The largest number of stages that a device holds."""
        return max(map(len, self.stages_of))


def _check(devices: int, chunks: int) -> None:
    if devices < 1:
        raise InputError(f"A pipeline needs at least one device, not {devices}.")
    if chunks < 1:
        raise InputError(f"A device needs at least one chunk, not {chunks}.")
