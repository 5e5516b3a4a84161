"""Batches as `Pipeline.step` takes them, checked and cut into micro-batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from debubble.ir import InputError
from debubble.runtime.models.units import MicroBatch

IGNORED = -100
"""Target of a token that has no part in the loss."""

Batch = Tensor | Mapping[str, Tensor]
"""Tokens [rows, length + 1], each to predict the next; or a mapping with `input_ids` and one of the following, [rows,
length] each, where -100 stands for no target:

* `labels`, as transformers takes them: `labels[r, t]` is the token at position t itself, which position t - 1 is to
  predict (often the `input_ids` themselves).
* `targets`: `targets[r, t]` is what position t is to predict.

It may also have an `attention_mask` and `position_ids` that change nothing: see `read_batch`.
"""

ENTRIES = ("input_ids", "labels", "targets", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Rows:
    """One step's tokens and targets, [rows, length] each."""

    tokens: Tensor
    targets: Tensor
    checksum: int
    """Checksum of both: ranks that have the same batch have the same one."""

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


def read_batch(batch: Batch, *, micro_batches: int, device: torch.device, may_pad: bool = False) -> Rows:
    """Check and move a batch.

    Args:
        batch: Tokens and targets (see `Batch`).
        micro_batches: Into how many equal ones it is to be cut.
        device: Where the tokens and targets go.
        may_pad: Whether the model computes the same with and without an `attention_mask` that hides the end of rows,
            at all positions before.

    Raises:
        InputError: The batch has the wrong shape, cannot be divided, or has an entry that cannot be honoured.
    """
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.shape[1] < 2:
            raise InputError(f"A batch of tokens has shape [rows, length + 1], not {list(batch.shape)}.")
        tokens, targets = batch[:, :-1], batch[:, 1:]
    else:
        tokens, targets = _tokens_and_targets(batch)
        if "attention_mask" in batch:
            _check_mask(batch["attention_mask"], targets, may_pad=may_pad)
        if "position_ids" in batch:
            _check_positions(batch["position_ids"], tokens.shape[1])
    if len(tokens) % micro_batches:
        raise InputError(f"A batch of {len(tokens)} rows cannot be cut into {micro_batches} equal micro-batches.")
    tokens, targets = tokens.contiguous(), targets.contiguous()
    return Rows(tokens.to(device), targets.to(device), _checksum(targets, _checksum(tokens)))


def check_entries(names: Iterable[str], owner: str) -> None:
    """Raise InputError if one of them is no entry of a `Batch`."""
    unknown = next((name for name in names if name not in ENTRIES), None)
    if unknown is not None:
        raise InputError(
            f"{owner} has an entry '{unknown}', which the runtime does not know: it knows {', '.join(ENTRIES)}."
        )


def _tokens_and_targets(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    check_entries(batch, "The batch")
    if "input_ids" not in batch:
        raise InputError("The batch has no entry 'input_ids'.")
    if ("labels" in batch) == ("targets" in batch):
        raise InputError(
            "The batch must have either 'labels' (the tokens themselves, as in transformers) or 'targets' (what each"
            " position is to predict)."
        )
    name = "labels" if "labels" in batch else "targets"
    tokens, labels = batch["input_ids"], batch[name]
    if tokens.dim() != 2 or tokens.shape != labels.shape:
        raise InputError(
            f"'input_ids' and '{name}' must both have shape [rows, length], not"
            f" {list(tokens.shape)} and {list(labels.shape)}."
        )
    return tokens, _shifted(labels) if name == "labels" else labels


def _shifted(labels: Tensor) -> Tensor:
    """The target of each position: the next one's label; the last position has none."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets


def _check_mask(mask: Tensor, targets: Tensor, *, may_pad: bool) -> None:
    """Refuse a mask that would change the loss."""
    if mask.shape == targets.shape:
        seen = mask != 0
        if seen.all():
            return
        # No position attends to later ones: what is hidden at the end of a row is seen by hidden positions alone.
        at_end = not (seen[:, 1:] & ~seen[:, :-1]).any()
        if may_pad and at_end and (targets[~seen] == IGNORED).all():
            return
    if may_pad:
        raise InputError(
            "The runtime computes without attention masks: 'attention_mask' [rows, length] may only hide the end of"
            " rows, where the targets are -100."
        )
    raise InputError("The runtime computes without attention masks: for this model 'attention_mask' must be all ones.")


def _check_positions(positions: Tensor, length: int) -> None:
    """Refuse positions that are not those that every model counts by itself."""
    if positions.shape[-1:] != (length,) or (positions != torch.arange(length, device=positions.device)).any():
        raise InputError(
            f"The runtime counts positions by itself: 'position_ids' must be 0 to {length - 1} in every row, or be left"
            " out."
        )


def _checksum(tensor: Tensor, start: int = 0) -> int:
    return zlib.crc32(tensor.cpu().view(torch.uint8).numpy().data, start)
