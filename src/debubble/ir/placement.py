"""Placement of stages on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from debubble.argument_types import with_checked_types
from debubble.errors import InputError
from debubble.pickling import PickledFields


@dataclass(frozen=True)
class Placement(PickledFields):
    """The device of every stage; every device holds at least one.

    Attributes:
        device_of: Per stage, its device.

    Raises:
        InputError: If there is no stage, or a device between 0 and the largest holds none.

    Example:
        >>> Placement.looped(devices=2, chunks=2).stages_of
        ((0, 2), (1, 3))
    """

    device_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.device_of:
            raise InputError("A placement needs at least one stage.")
        if set(self.device_of) != set(range(len(set(self.device_of)))):
            raise InputError(f"Every device from 0 up must hold a stage; the placement is {list(self.device_of)}.")

    @staticmethod
    @with_checked_types()
    def linear(devices: int) -> Placement:
        """Place one stage on each device."""
        return Placement.looped(devices)

    @staticmethod
    @with_checked_types()
    def looped(devices: int, chunks: int = 1) -> Placement:
        """Place stage s on device s mod p (Megatron's interleaving), with `chunks` stages per device."""
        _check(devices, chunks)
        return Placement(tuple(s % devices for s in range(devices * chunks)))

    @staticmethod
    @with_checked_types()
    def v_shape(devices: int, chunks: int = 2) -> Placement:
        """Place even chunks from first to last device, odd ones in reverse (Controllable Memory, NeurIPS 2024)."""
        _check(devices, chunks)
        down = tuple(range(devices))
        return Placement(tuple(d for c in range(chunks) for d in (down if c % 2 == 0 else down[::-1])))

    @staticmethod
    def of(device_of: Sequence[int]) -> Placement:
        """Place stage s on device `device_of[s]`."""
        return Placement(tuple(device_of))

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.device_of)

    @cached_property
    def devices(self) -> int:
        """The number of devices."""
        return max(self.device_of) + 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device in model order; the k-th is its chunk k."""
        stages: list[list[int]] = [[] for _ in range(self.devices)]
        for stage, device in enumerate(self.device_of):
            stages[device].append(stage)
        return tuple(map(tuple, stages))

    @property
    def chunks(self) -> int:
        """The maximum number of stages on a device."""
        return max(map(len, self.stages_of))

    def last_chunks(self, chunks: int) -> frozenset[int]:
        """The stages of the last `chunks` chunks of every device.  Raises InputError if there are fewer."""
        if not 0 <= chunks <= self.chunks:
            raise InputError(f"The last {chunks} chunks of each device are asked for, but there are {self.chunks}.")
        return frozenset(stage for stages in self.stages_of for stage in stages[max(0, len(stages) - chunks) :])


def _check(devices: int, chunks: int) -> None:
    if devices < 1:
        raise InputError(f"A pipeline needs at least one device, not {devices}.")
    if chunks < 1:
        raise InputError(f"A device needs at least one chunk, not {chunks}.")
