"""What `Pipeline.step` is given, cut into micro-batches."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from debubble.ir import InputError
from debubble.runtime.models.units import MicroBatch

IGNORED = -100
"""Target of a token that has no part in the loss."""

Batch = Tensor | Mapping[str, Tensor]
"""Tokens [rows, length + 1], each to predict the next; or `input_ids` and `labels`, [rows, length] each, where
`labels[r, t]` is the token to predict at position t (-100: none)."""


@dataclass(frozen=True)
class Rows:
    """One step's tokens and targets, [rows, length] each."""

    tokens: Tensor
    targets: Tensor

    @property
    def counted(self) -> int:
        """Tokens that have a part in the loss."""
        return int((self.targets != IGNORED).sum())

    def split(self, micro_batches: int, *, scale: float, seed: int) -> tuple[list[Tensor], list[MicroBatch]]:
        """Equal micro-batches; every loss is scaled by `scale`, every dropout mask follows from `seed`."""
        # Storages of their own: what one micro-batch saves can be offloaded without the others.
        tokens, targets = ([part.clone() for part in t.chunk(micro_batches)] for t in (self.tokens, self.targets))
        seeds = (zlib.crc32(f"{seed} {j}".encode()) for j in range(micro_batches))
        return tokens, [MicroBatch(t, scale, s) for t, s in zip(targets, seeds, strict=True)]


def read_batch(batch: Batch, *, micro_batches: int, device: torch.device) -> Rows:
    """Check and move a batch.  Raises InputError if it has the wrong shape or cannot be divided."""
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.shape[1] < 2:
            raise InputError(f"A batch of tokens has shape [rows, length + 1], not {list(batch.shape)}.")
        tokens, targets = batch[:, :-1], batch[:, 1:]
    else:
        missing = [name for name in ("input_ids", "labels") if name not in batch]
        if missing:
            raise InputError(f"The batch has no entry '{missing[0]}'.")
        tokens, targets = batch["input_ids"], batch["labels"]
        if tokens.dim() != 2 or tokens.shape != targets.shape:
            raise InputError(
                "'input_ids' and 'labels' must both have shape [rows, length], not"
                f" {list(tokens.shape)} and {list(targets.shape)}."
            )
    if len(tokens) % micro_batches:
        raise InputError(f"A batch of {len(tokens)} rows cannot be cut into {micro_batches} equal micro-batches.")
    return Rows(tokens.to(device).contiguous(), targets.to(device).contiguous())
