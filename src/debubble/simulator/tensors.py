"""The tensors of a Program, each with the operation that allocates it and the one that frees it.

`Program.allocated` and `Program.freed` are sums over tensors.  Memory freed by different operations is split into
separate tensors: the offloaded and the remaining part of an activation, the parts freed by I and by W, and what a
recomputation restores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir import Kind, Program
from debubble.ir.arrays import Ints, Numbers
from debubble.ir.ops import CODE, RESHARDS, UNSHARDS
from debubble.ir.program import NO_PEER

_ROUNDING = 1e-12
"""Sizes below this fraction of the largest tensor are rounding errors."""


class Tensors(NamedTuple):
    """Arrays with an entry per tensor, live from the start of one instruction to the end of another."""

    device: Ints
    allocated_by: Ints
    """Instructions of the program."""
    freed_by: Ints
    size: Numbers


def tensors_of(program: Program) -> Tensors:
    """The tensors of all devices; a device's live tensors sum to its activations and gathered parameters."""
    collector = _TensorCollector(program)
    collector.add_activations()
    collector.add_key_value_gradients()
    collector.add_hosted()
    collector.add_gathered()
    device, allocated_by, freed_by, size = (np.concatenate(columns) for columns in zip(*collector.columns, strict=True))
    is_nonzero = size > _ROUNDING * max(size.tolist(), default=0)
    return Tensors(device[is_nonzero], allocated_by[is_nonzero], freed_by[is_nonzero], size[is_nonzero])


class _TensorCollector:
    """Collects the tensors of a program in arrays by stage and micro-batch; -1 means no instruction."""

    def __init__(self, program: Program) -> None:
        self.program, self.schedule = program, program.schedule
        self.columns: list[tuple[Numbers, ...]] = []
        self.offload, self.reload, weights = (self._instructions(kind) for kind in (Kind.O, Kind.L, Kind.W))
        fused, split = self._instructions(Kind.B), self._instructions(Kind.I)
        self.backward = np.where(split >= 0, split, fused)
        self.weights = np.where(weights >= 0, weights, self.backward)
        self.freed_by_weights = _bytes(program.freed, weights)
        self.offloaded = _bytes(program.freed, self.offload)
        self.gradients = self._key_value_gradients()

    def add_activations(self) -> None:
        """Add what F retains, what reloads and recomputations restore, and the workspaces of backwards."""
        program, forward, recompute = self.program, self._instructions(Kind.F), self._instructions(Kind.R)
        self._add(forward, self.offload, self.offloaded)
        workspace = program.allocated[self.backward] - self._gradients_of_earlier_slices()
        remaining = self.freed_by_weights
        for allocates, size in (
            (forward, program.allocated[forward] - self.offloaded),
            (self.reload, _bytes(program.allocated, self.reload)),
            (recompute, _bytes(program.allocated, recompute)),
            (self.backward, workspace),
        ):
            for_weights = np.minimum(size, remaining)
            remaining = remaining - for_weights
            self._add(allocates, self.weights, for_weights)
            self._add(allocates, self.backward, size - for_weights)

    def add_key_value_gradients(self) -> None:
        """Add the gradients of a slice's keys and values, from the backward of the last slice to its own."""
        slices = self.schedule.slices
        last = np.repeat(self.backward[:, slices - 1 :: slices], slices, axis=1)
        self._add(last, self.backward, np.where(last == self.backward, 0, self.gradients))

    def add_hosted(self) -> None:
        """Add activations held for a peer, from the start of its offload to the end of its reload."""
        peer = np.where(self.offload >= 0, self.program.peer[self.offload], NO_PEER)
        hosted = peer != NO_PEER
        self._add(self.offload[hosted], self.reload[hosted], self.offloaded[hosted], device=peer[hosted])

    def add_gathered(self) -> None:
        """Add gathered parameters; those of a stage are freed before they are gathered again."""
        gathers, frees = (self._by_stage([CODE[kind] for kind in kinds]) for kinds in (UNSHARDS, RESHARDS))
        self._add(gathers, frees, self.program.allocated[gathers])

    def _by_stage(self, kinds: list[int]) -> Ints:
        """The instructions of these kinds, ordered by stage."""
        instructions = np.flatnonzero(np.isin(self.program.kind, kinds))
        ordered: Ints = instructions[np.argsort(self.program.stage[instructions], kind="stable")]
        return ordered

    def _add(self, allocates: Ints, frees: Ints, size: Numbers, *, device: Ints | None = None) -> None:
        device = self.program.device[allocates] if device is None else device
        self.columns.append(tuple(column.ravel() for column in (device, allocates, frees, size)))

    def _instructions(self, kind: Kind) -> Ints:
        instructions: Ints = self.schedule.positions[CODE[kind]]
        return instructions

    def _key_value_gradients(self) -> Numbers:
        """Bytes of the gradients of each slice's keys and values; 0 if sequences are not sliced."""
        costs, shape = self.program.costs, self.backward.shape
        if costs.slices == 1:
            return np.zeros(shape, dtype=np.int64)
        scale = np.array([costs.scale_of(j) for j in range(shape[1])], dtype=object)
        return np.broadcast_to(np.array(costs.key_value_gradient, dtype=object)[:, None] * scale, shape)

    def _gradients_of_earlier_slices(self) -> Numbers:
        """Bytes that the last slice's backward allocates for the earlier slices."""
        slices = self.schedule.slices
        per_sequence = self.gradients.reshape(len(self.gradients), -1, slices)
        result = np.zeros_like(per_sequence)
        result[:, :, -1] = per_sequence[:, :, :-1].sum(axis=2)
        return result.reshape(self.gradients.shape)


def _bytes(column: Numbers, instructions: Ints) -> Numbers:
    """The bytes of instructions, 0 for none."""
    return np.where(instructions >= 0, column[instructions], 0)
