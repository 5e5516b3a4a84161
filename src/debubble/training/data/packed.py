"""Micro-batches of sequences of different lengths, packed without padding.

The sequences of a step depend on the seed only, as for samples of one length; they are assigned to micro-batches by
length, as plans assume.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from debubble.costs.lengths import packed
from debubble.files import read_file
from debubble.ir import InputError
from debubble.runtime.steps.batch import IGNORED
from debubble.training.data.text import shuffled_indices


def read_sequences(file: Path, *, longest: int, vocabulary: int) -> list[list[int]]:
    """Read JSON lines with `input_ids`.  Raises InputError for none, too long ones, or tokens beyond the vocabulary."""
    lines = read_file(file, "data file").decode(errors="replace").splitlines()
    try:
        sequences = [[*map(int, json.loads(line)["input_ids"])] for line in lines if line.strip()]
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{file} is not readable: give JSON lines with `input_ids`, the tokens of each.") from None
    if not all(sequences) or not sequences:
        raise InputError(f"{file} has no sequence, or an empty one.")
    if (max_length := max(map(len, sequences))) > longest:
        raise InputError(f"{file} has a sequence of {max_length} tokens, but the plan's have at most {longest}.")
    if not all(min(tokens) >= 0 and max(tokens) < vocabulary for tokens in sequences):
        raise InputError(f"{file} has tokens that are not in the model's vocabulary of {vocabulary}.")
    return sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequences:
    """The steps of a run on sequences of different lengths."""

    sequences: Sequence[Sequence[int]]
    micro_batches: int
    """Micro-batches per pipeline and step."""
    micro_batch_size: int
    """Sequences per micro-batch."""
    replicas: int = 1
    seed: int = 0

    @property
    def per_step(self) -> int:
        """Sequences per step, over all replicas."""
        return self.micro_batches * self.micro_batch_size * self.replicas

    def lengths(self, step: int) -> list[list[int]]:
        """The sequence lengths of a step's micro-batches, those with the most tokens first."""
        return [[len(self.sequences[index]) for index in indices] for indices in self._step(step)]

    def batch(self, step: int, *, replica: int, ranks: Sequence[int]) -> list[dict[str, Tensor]]:
        """A replica's micro-batches, padded to the length of those that other replicas run at the same time.

        Args:
            step: Index of the step, from 0.
            replica: Index of the replica; micro-batches are assigned to replicas round-robin, longest first.
            ranks: Per micro-batch of the plan, the rank by length (0: longest) of the micro-batch that it runs.
        """
        rows = [[self.sequences[index] for index in indices] for indices in self._step(step)]
        longest = [sum(map(len, row)) for row in rows[:: self.replicas]]
        micro_batches = rows[replica :: self.replicas]
        return [_row(micro_batches[rank], longest[rank]) for rank in ranks]

    def _step(self, step: int) -> list[list[int]]:
        return _packed_step(self, step)


@lru_cache(maxsize=4)  # a step is requested first for its lengths, then for its tokens
def _packed_step(data: PackedSequences, step: int) -> list[list[int]]:
    count = data.per_step
    indices = shuffled_indices(step * count, count=count, per_epoch=len(data.sequences), seed=data.seed).tolist()
    lengths = [len(data.sequences[index]) for index in indices]
    micro_batches = packed(lengths, micro_batches=data.micro_batches * data.replicas)
    return [[indices[index] for index in micro_batch] for micro_batch in micro_batches]


def _row(sequences: Sequence[Sequence[int]], length: int) -> dict[str, Tensor]:
    """Concatenate sequences with separate positions and targets, and pad with one without targets."""
    padding = [0] * (length - sum(map(len, sequences)))
    tokens = [*(token for sequence in sequences for token in sequence), *padding]
    targets = [*(token for sequence in sequences for token in (*sequence[1:], IGNORED)), *(IGNORED for _ in padding)]
    positions = [position for sequence in (*sequences, padding) for position in range(len(sequence))]
    rows = {"input_ids": tokens, "targets": targets, "position_ids": positions}
    return {name: torch.tensor([row]) for name, row in rows.items()}
