"""The tensors of a Program: the parts of its memory, from the operation that allocates each to the one that frees it.

`Program.allocated` and `Program.freed` are sums.  Here every part of them that another operation frees is a tensor of
its own: what O moves and what it leaves, what I frees and what remains for W, what a recomputation brings back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir import Kind, Program
from debubble.ir.arrays import Ints, Numbers
from debubble.ir.ops import CODE, RESHARDS, UNSHARDS
from debubble.ir.program import NO_PEER

_NOISE = 1e-12
"""Share of the largest tensor below which what is left of floats counts as nothing."""


class Tensors(NamedTuple):
    """Tensors as arrays with one entry each.  They live from the start of one instruction to the end of another."""

    device: Ints
    allocated_by: Ints
    """Instructions of the program."""
    freed_by: Ints
    size: Numbers


def tensors_of(program: Program) -> Tensors:
    """The tensors of all devices; those of a device sum to its activations and gathered parameters at every moment."""
    found = _Finder(program)
    found.add_activations()
    found.add_key_value_gradients()
    found.add_hosted()
    found.add_gathered()
    device, allocated_by, freed_by, size = (np.concatenate(columns) for columns in zip(*found.columns, strict=True))
    there = size > _NOISE * max(size.tolist(), default=0)
    return Tensors(device[there], allocated_by[there], freed_by[there], size[there])


class _Finder:
    """Collects the tensors of a program.  Its arrays have an entry per stage and micro-batch; -1 is no instruction."""

    def __init__(self, program: Program) -> None:
        self.program, self.schedule = program, program.schedule
        self.columns: list[tuple[Numbers, ...]] = []
        self.offload, self.reload, weights = (self._instructions(kind) for kind in (Kind.O, Kind.L, Kind.W))
        whole, split = self._instructions(Kind.B), self._instructions(Kind.I)
        self.backward = np.where(split >= 0, split, whole)
        self.weights = np.where(weights >= 0, weights, self.backward)
        self.left_by_input = _bytes(program.freed, weights)
        self.moved = _bytes(program.freed, self.offload)
        self.gradients = self._key_value_gradients()

    def add_activations(self) -> None:
        """Add what F leaves, reloads and recomputations bring back, and backwards allocate for themselves."""
        program, forward, recompute = self.program, self._instructions(Kind.F), self._instructions(Kind.R)
        self._add(forward, self.offload, self.moved)
        workspace = program.allocated[self.backward] - self._gradients_of_others()
        remaining = self.left_by_input
        for allocates, size in (
            (forward, program.allocated[forward] - self.moved),
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
        """Add what devices hold for a peer, from the start of its offload to the end of its reload."""
        peer = np.where(self.offload >= 0, self.program.peer[self.offload], NO_PEER)
        hosted = peer != NO_PEER
        self._add(self.offload[hosted], self.reload[hosted], self.moved[hosted], device=peer[hosted])

    def add_gathered(self) -> None:
        """Add gathered parameters, of which a stage's are freed before they are gathered again."""
        gathers, frees = (
            np.flatnonzero(np.isin(self.program.kind, [CODE[kind] for kind in kinds])) for kinds in (UNSHARDS, RESHARDS)
        )
        gathers, frees = (each[np.argsort(self.program.stage[each], kind="stable")] for each in (gathers, frees))
        self._add(gathers, frees, self.program.allocated[gathers])

    def _add(self, allocates: Ints, frees: Ints, size: Numbers, *, device: Ints | None = None) -> None:
        device = self.program.device[allocates] if device is None else device
        self.columns.append(tuple(column.ravel() for column in (device, allocates, frees, size)))

    def _instructions(self, kind: Kind) -> Ints:
        instructions: Ints = self.schedule.positions[CODE[kind]]
        return instructions

    def _key_value_gradients(self) -> Numbers:
        """Bytes of the gradients of each slice's keys and values; none where sequences are whole."""
        costs, shape = self.program.costs, self.backward.shape
        if costs.slices == 1:
            return np.zeros(shape, dtype=np.int64)
        scale = np.array([costs.scale_of(j) for j in range(shape[1])], dtype=object)
        return np.broadcast_to(np.array(costs.key_value_gradient, dtype=object)[:, None] * scale, shape)

    def _gradients_of_others(self) -> Numbers:
        """Bytes that the last slice's backward allocates for the slices before it."""
        slices = self.schedule.slices
        per_sequence = self.gradients.reshape(len(self.gradients), -1, slices)
        result = np.zeros_like(per_sequence)
        result[:, :, -1] = per_sequence[:, :, :-1].sum(axis=2)
        return result.reshape(self.gradients.shape)


def _bytes(column: Numbers, instructions: Ints) -> Numbers:
    """The bytes of instructions, 0 where there is none."""
    return np.where(instructions >= 0, column[instructions], 0)
