"""Sequences of their own lengths: the micro-batches of each step, packed without padding.

Which sequences a step has depends on the seed alone, as for samples of one length; they are assigned to micro-batches
by their lengths, as plans count on.
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
    """The tokens of JSON lines with `input_ids`.  Raises InputError if they are none, too long, or of other tokens."""
    lines = read_file(file, "data file").decode(errors="replace").splitlines()
    try:
        sequences = [[*map(int, json.loads(line)["input_ids"])] for line in lines if line.strip()]
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{file} is not readable: give JSON lines with `input_ids`, the tokens of each.") from None
    if not all(sequences) or not sequences:
        raise InputError(f"{file} has no sequence, or an empty one.")
    if (found := max(map(len, sequences))) > longest:
        raise InputError(f"{file} has a sequence of {found} tokens, but the plan's have at most {longest}.")
    if not all(min(tokens) >= 0 and max(tokens) < vocabulary for tokens in sequences):
        raise InputError(f"{file} has tokens that are not in the model's vocabulary of {vocabulary}.")
    return sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequences:
    """The steps of a run on sequences of their own lengths."""

    sequences: Sequence[Sequence[int]]
    micro_batches: int
    """Micro-batches of each pipeline and step."""
    micro_batch_size: int
    """Sequences that a micro-batch has."""
    replicas: int = 1
    seed: int = 0

    @property
    def per_step(self) -> int:
        """Sequences of a step, over all replicas."""
        return self.micro_batches * self.micro_batch_size * self.replicas

    def lengths(self, step: int) -> list[list[int]]:
        """The lengths of the sequences of a step's micro-batches, those with the most tokens first."""
        return [[len(self.sequences[place]) for place in places] for places in self._step(step)]

    def batch(self, step: int, *, replica: int, ranks: Sequence[int]) -> list[dict[str, Tensor]]:
        """A replica's micro-batches, as long as those that other replicas have at once.

        Args:
            step: The step's number, from 0.
            replica: The micro-batches go, longest first, one to each replica in turn.
            ranks: Which of the replica's micro-batches, counted from the longest, stands at each place of the plan.
        """
        rows = [[self.sequences[place] for place in places] for places in self._step(step)]
        longest = [sum(map(len, row)) for row in rows[:: self.replicas]]
        own = rows[replica :: self.replicas]
        return [_row(own[rank], longest[rank]) for rank in ranks]

    def _step(self, step: int) -> list[list[int]]:
        return _packed_step(self, step)


@lru_cache(maxsize=4)  # a step is asked for by its lengths, then by its tokens
def _packed_step(of: PackedSequences, step: int) -> list[list[int]]:
    count = of.per_step
    places = shuffled_indices(step * count, count=count, per_epoch=len(of.sequences), seed=of.seed).tolist()
    lengths = [len(of.sequences[place]) for place in places]
    micro_batches = packed(lengths, micro_batches=of.micro_batches * of.replicas)
    return [[places[at] for at in micro_batch] for micro_batch in micro_batches]


def _row(sequences: Sequence[Sequence[int]], length: int) -> dict[str, Tensor]:
    """Sequences one after the other, each with positions and targets of its own, filled up with one without targets."""
    filling = [0] * (length - sum(map(len, sequences)))
    tokens = [*(token for each in sequences for token in each), *filling]
    targets = [*(token for each in sequences for token in (*each[1:], IGNORED)), *(IGNORED for _ in filling)]
    positions = [place for each in (*sequences, filling) for place in range(len(each))]
    rows = {"input_ids": tokens, "targets": targets, "position_ids": positions}
    return {name: torch.tensor([row]) for name, row in rows.items()}
