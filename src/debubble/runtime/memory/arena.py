"""An arena: the memory of one device in a step by its address plan, and a check that the plan suffices.

A tensor of an address plan stands for many storages: some of those that a stage saves of a micro-batch.  Most are
outputs of operators, which torch's allocator places; for them the arena checks that all storages of a stage and
micro-batch fit into its live tensors.  Planned tensors that the runtime allocates itself are at their addresses.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from debubble.ir import DebubbleError, Kind, Op
from debubble.ir.ops import RESHARDS, UNSHARDS
from debubble.plans import Plan
from debubble.simulator import AddressPlan, PlacedTensor, plan_addresses

ALIGNMENT = 64
"""Alignment in bytes of torch's allocator on the CPU."""

Owner = tuple[int, int]
"""A stage and a sequence (a micro-batch, or all slices of one), whose storages share planned tensors."""
GATHERED: Owner = (-1, -1)
"""The owner of all gathered parameters: a tied table belongs to two stages."""

_ALLOCATING_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
"""Operation kinds on the compute lane that allocate storages of their stage and micro-batch."""

Place = Callable[[int], Tensor | None]
"""Returns memory for the next `size` bytes of a planned tensor; None: there is no planned place."""


class ArenaError(DebubbleError):
    """A step needs memory that the address plan of its device does not have."""


class Arena:
    """The memory of a device in a step, for the tensors of its address plan.

    Args:
        plan: The address of every tensor, with integer sizes and offsets.
        slices: Slices per sequence, each of which is a micro-batch of the schedule.
        device: torch device of the tensors.  Only on a CPU are tensors placed, as untouched memory costs nothing there.
        size: Bytes of the arena; None: as planned.
    """

    def __init__(
        self, plan: AddressPlan, *, slices: int = 1, device: torch.device | None = None, size: int | None = None
    ) -> None:
        self.plan, self.size = plan, int(plan.arena) if size is None else size
        self.owner: Owner = GATHERED
        """The owner of what the compute lane allocates now."""
        self.placed = 0
        """Bytes placed at planned addresses in the last step, counted once per reload."""
        self.workspace = 0
        """Largest excess of an I over its tensors in the last step, in bytes; the plan's static bytes cover it."""
        self._splitting: Op | None = None
        self._slices = slices
        self._allocated_by, self._freed_by = (defaultdict[Op, list[PlacedTensor]](list) for _ in range(2))
        for tensor in plan.tensors:
            self._allocated_by[tensor.allocated_by].append(tensor)
            self._freed_by[tensor.freed_by].append(tensor)
        on_cpu = device is None or device.type == "cpu"
        self._memory = torch.empty(self.size, dtype=torch.uint8).numpy() if on_cpu and self.size else None
        self._live: set[PlacedTensor] = set()
        self._capacity, self._bytes = defaultdict[Owner, int](int), defaultdict[Owner, int](int)
        # Storages can be finalized in any thread that runs the garbage collector.
        self._lock = threading.RLock()

    @staticmethod
    def from_plan(plan: Plan, device: int, *, on: torch.device) -> Arena:
        """Build the arena of one device of a plan, for tensors on the torch device `on`."""
        [addresses] = plan_addresses(plan.simulate(), devices=[device], alignment=ALIGNMENT)
        return Arena(addresses, slices=plan.schedule.slices, device=on)

    def start_step(self) -> None:
        """Reset to no live tensors."""
        with self._lock:
            self._live.clear()
            self._capacity.clear()
            self.placed = self.workspace = 0

    def begin(self, op: Op) -> None:
        """Start an operation: its tensors become live.

        Raises:
            ArenaError: A tensor extends beyond the arena, or overlaps a live one.
        """
        with self._lock:
            if op.kind in _ALLOCATING_KINDS:
                self.owner, self._splitting = self.owner_of(op), op if op.kind is Kind.I else None
            for tensor in self._allocated_by.get(op, ()):
                self._check_free(tensor)
                self._live.add(tensor)
                self._capacity[self.owner_of(tensor.freed_by)] += int(tensor.size)

    def end(self, op: Op) -> None:
        """End an operation: the tensors that it frees are no longer live.

        Raises:
            ArenaError: The owner's remaining storages exceed its live tensors.
        """
        owner = self.owner_of(op)
        with self._lock:
            if op == self._splitting:
                self._splitting = None
            for tensor in self._freed_by.get(op, ()):
                self._live.remove(tensor)
                self._capacity[owner] -= int(tensor.size)
                if self._bytes[owner] > self._capacity[owner]:
                    raise ArenaError(
                        f"{op.name} has ended on device {self.plan.device}, and {self._bytes[owner]:,} bytes of"
                        f" {_owner_name(owner)} are still there, where the plan has {self._capacity[owner]:,}."
                    )

    def count(self, owner: Owner, change: int) -> None:
        """Add to the bytes of an owner's storages.

        Raises:
            ArenaError: They exceed the owner's live tensors.
        """
        with self._lock:
            total = self._bytes[owner] + change
            if self._splitting is not None and owner == self.owner:
                self.workspace = max(self.workspace, total - self._capacity[owner])
            elif change > 0 and total > self._capacity[owner]:
                raise ArenaError(
                    f"Device {self.plan.device} asks for {change:,} bytes more of {_owner_name(owner)}, {total:,} in"
                    f" all, where the plan has {self._capacity[owner]:,}."
                )
            self._bytes[owner] = total

    def placer(self, op: Op) -> Place:
        """A function that places what an operation allocates, if that is one tensor that a B frees.

        Of tensors that an I and its W free, only sizes are known, not storages.
        """
        tensors = self._allocated_by.get(op, ())
        if self._memory is None or len(tensors) != 1 or tensors[0].freed_by.kind is not Kind.B:
            return _no_place
        [tensor] = tensors
        return _TensorPlacer(self, tensor)

    def tensor_at(self, offset: int, size: int) -> Tensor:
        """The bytes at an address, as a storage of their own."""
        with self._lock:
            self.placed += size
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)

    def owner_of(self, op: Op) -> Owner:
        """The owner of the tensors that an operation frees."""
        return GATHERED if op.kind in (*UNSHARDS, *RESHARDS) else (op.stage, op.micro_batch // self._slices)

    def _check_free(self, tensor: PlacedTensor) -> None:
        end = tensor.offset + tensor.size
        asked = f"{tensor.allocated_by.name} asks for {tensor.size:,} bytes at {tensor.offset:,} on device"
        if end > self.size:
            raise ArenaError(f"{asked} {self.plan.device}, whose arena has {self.size:,}.")
        for other in self._live:
            if other.offset < end and tensor.offset < other.offset + other.size:
                raise ArenaError(
                    f"{asked} {self.plan.device}, where {other.size:,} bytes of {other.allocated_by.name} at"
                    f" {other.offset:,} are live."
                )


class _TensorPlacer:
    """Hands out the bytes of one planned tensor, from its start."""

    def __init__(self, arena: Arena, tensor: PlacedTensor) -> None:
        self._arena = arena
        self._next, self._end = int(tensor.offset), int(tensor.offset + tensor.size)

    def __call__(self, size: int) -> Tensor | None:
        begin = self._next
        if not 0 < size <= self._end - begin:
            return None
        self._next = begin + -(-size // ALIGNMENT) * ALIGNMENT
        return self._arena.tensor_at(begin, size)


def _no_place(size: int) -> None:
    """Place nothing."""


def _owner_name(owner: Owner) -> str:
    return "gathered parameters" if owner == GATHERED else f"stage {owner[0]}'s sequence {owner[1]}"
