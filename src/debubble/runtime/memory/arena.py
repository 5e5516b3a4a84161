"""An arena: the memory of one device in a step, as its address plan gives it out, and a check that this is enough.

A tensor of an address plan is a part of what a stage keeps of a micro-batch, and so many storages.  Most of them are
outputs of operators, which torch's allocator places; these are accounted: all that a stage keeps of a micro-batch has
to fit into its tensors that are live.  What the runtime itself allocates as a whole tensor lies at its address.
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
"""Bytes: that of torch's allocator on the CPU."""

Owner = tuple[int, int]
"""A stage and a sequence, whose storages share the tensors of their slices."""
GATHERED: Owner = (-1, -1)
"""The owner of all gathered parameters: a table that is tied belongs to two stages."""

_MAKING = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
"""Kinds of operations that make storages of their own stage and micro-batch, on the compute lane."""

Place = Callable[[int], Tensor | None]
"""Gives memory for the next so many bytes of a tensor; None: the arena has no place for them."""


class ArenaError(DebubbleError):
    """A step needs memory that the address plan of its device does not give it."""


class Arena:
    """The memory of a device in a step, for the tensors of its address plan.

    Args:
        plan: Where each tensor lies, with whole sizes and offsets.
        slices: The slices of each sequence, which are micro-batches of their own.
        device: Where the tensors are.  Only on a CPU is anything placed: memory that is not touched is free there.
        size: Bytes of the arena; None: as many as planned.
    """

    def __init__(
        self, plan: AddressPlan, *, slices: int = 1, device: torch.device | None = None, size: int | None = None
    ) -> None:
        self.plan, self.size = plan, int(plan.arena) if size is None else size
        self.owner: Owner = GATHERED
        """The owner of what the compute lane makes now."""
        self.placed = 0
        """Bytes of the last step that were at their addresses, each as often as they were brought there."""
        self.workspace = 0
        """Most bytes that an I of the last step had beyond its tensors: the plan's static bytes have room for them."""
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
        # Storages die, and are counted out, wherever the garbage collector runs.
        self._lock = threading.RLock()

    @staticmethod
    def of(plan: Plan, device: int, *, on: torch.device) -> Arena:
        """The arena of one device of a plan, whose tensors are on the torch device `on`."""
        [addresses] = plan_addresses(plan.simulate(), devices=[device], alignment=ALIGNMENT)
        return Arena(addresses, slices=plan.schedule.slices, device=on)

    def start_step(self) -> None:
        """Nothing of the step is live yet."""
        with self._lock:
            self._live.clear()
            self._capacity.clear()
            self.placed = self.workspace = 0

    def begin(self, op: Op) -> None:
        """An operation starts: its tensors are live.

        Raises:
            ArenaError: One of them lies beyond the end of the arena, or where another one is live.
        """
        with self._lock:
            if op.kind in _MAKING:
                self.owner, self._splitting = self.owner_of(op), op if op.kind is Kind.I else None
            for tensor in self._allocated_by.get(op, ()):
                self._check_free(tensor)
                self._live.add(tensor)
                self._capacity[self.owner_of(tensor.freed_by)] += int(tensor.size)

    def end(self, op: Op) -> None:
        """An operation has ended: the tensors that it frees are no longer live.

        Raises:
            ArenaError: More of them is there still than what is live has room for.
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
                        f" {_named(owner)} are still there, where the plan has {self._capacity[owner]:,}."
                    )

    def count(self, owner: Owner, change: int) -> None:
        """Storages of the owner have come, or gone.

        Raises:
            ArenaError: The owner's live tensors have no room for them.
        """
        with self._lock:
            total = self._bytes[owner] + change
            if self._splitting is not None and owner == self.owner:
                self.workspace = max(self.workspace, total - self._capacity[owner])
            elif change > 0 and total > self._capacity[owner]:
                raise ArenaError(
                    f"Device {self.plan.device} asks for {change:,} bytes more of {_named(owner)}, {total:,} in all,"
                    f" where the plan has {self._capacity[owner]:,}."
                )
            self._bytes[owner] = total

    def placing(self, op: Op) -> Place:
        """The places of what an operation allocates, if that is one tensor, which a B frees.

        An I and its W free tensors of which only the sizes are known, not the storages.
        """
        tensors = self._allocated_by.get(op, ())
        if self._memory is None or len(tensors) != 1 or tensors[0].freed_by.kind is not Kind.B:
            return _nowhere
        [tensor] = tensors
        return _Placing(self, tensor)

    def at(self, offset: int, size: int) -> Tensor:
        """The bytes at an address, on a storage of their own."""
        with self._lock:
            self.placed += size
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset)

    def owner_of(self, op: Op) -> Owner:
        """Whose tensors an operation frees."""
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


class _Placing:
    """Gives the bytes of one tensor, from its first on."""

    def __init__(self, arena: Arena, tensor: PlacedTensor) -> None:
        self._arena = arena
        self._next, self._end = int(tensor.offset), int(tensor.offset + tensor.size)

    def __call__(self, size: int) -> Tensor | None:
        begin = self._next
        if not 0 < size <= self._end - begin:
            return None
        self._next = begin + -(-size // ALIGNMENT) * ALIGNMENT
        return self._arena.at(begin, size)


def _nowhere(size: int) -> None:
    """Give no place."""


def _named(owner: Owner) -> str:
    return "gathered parameters" if owner == GATHERED else f"stage {owner[0]}'s sequence {owner[1]}"
