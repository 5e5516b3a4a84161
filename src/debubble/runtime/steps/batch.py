"""Batches as `Pipeline.step` takes them, checked and cut into micro-batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from debubble.ir import InputError
from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.models.attention.slices import SequenceSlice, SlicedSequence
from debubble.runtime.models.units import MicroBatch

IGNORED = -100
"""Target of a token that has no part in the loss."""

Entries = Tensor | Mapping[str, Tensor]
"""One of a `Batch`, not a sequence of them."""

Batch = Entries | Sequence[Entries]
"""Tokens [rows, length + 1], each to predict the next; or a mapping with `input_ids` and one of the following, [rows,
length] each, where -100 stands for no target:

* `labels`, as transformers takes them: `labels[r, t]` is the token at position t itself, which position t - 1 is to
  predict (often the `input_ids` themselves).
* `targets`: `targets[r, t]` is what position t is to predict.

It may also have an `attention_mask` and `position_ids`, as transformers takes them: see `read_batch`.  A sequence of
such is one for each micro-batch, whose rows and lengths may differ.  A loss of your own may ask for more entries, with
as many rows (see `Loss`).

Modules of your own take `inputs` [rows, ...] and `targets` [rows, ...] of any two shapes: images and a label for each.
"""

ENTRIES = ("input_ids", "labels", "targets", "attention_mask", "position_ids")
INPUTS = "inputs"
"""The entry of modules of the user's own, which may be called `input_ids` too."""
Cut = Callable[[int], tuple[int, ...]]
"""The tokens of each slice of a sequence of so many tokens."""


def whole(length: int) -> tuple[int, ...]:
    """One slice: the whole sequence."""
    return (length,)


@dataclass(frozen=True)
class TokenRows:
    """Tokens and targets, [rows, length] each, of a step or of one micro-batch.

    Of modules of the user's own, inputs and targets [rows, ...].
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    """Position of each token, [rows or 1, length]; None: 0, 1, 2 and so on in every row."""
    documents: Tensor | None = None
    """Number of the document that each token belongs to, which alone it attends to; None: a row is one."""
    loss_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Entries that the loss asks for, [rows, ...] each, by name."""

    @property
    def counted(self) -> int:
        """Tokens that have a part in the loss."""
        return int((self.targets != IGNORED).sum())

    def cut(self, parts: int) -> list[TokenRows]:
        """Equal parts, each with storages of its own: what one micro-batch saves can be offloaded without the others.

        Raises InputError if the rows cannot be divided so.
        """
        if len(self.tokens) % parts:
            raise InputError(f"A batch of {len(self.tokens)} rows cannot be cut into {parts} equal micro-batches.")
        return [self.each(partial(_part, index=index, parts=parts)) for index in range(parts)]

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenRows:
        """The rows with every tensor changed so."""
        return TokenRows(
            change(self.tokens),
            change(self.targets),
            None if self.positions is None else change(self.positions),
            None if self.documents is None else change(self.documents),
            {name: change(tensor) for name, tensor in self.loss_inputs.items()},
        )


@dataclass(frozen=True)
class StepBatch:
    """One step's micro-batches."""

    parts: Sequence[TokenRows]
    """One for each micro-batch."""
    checksum: int
    """Checksum of all that was given: ranks that have the same batch have the same one."""
    counted: int
    """Tokens of the whole sequences that have a part in the loss."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Rows and length of each micro-batch."""
        return tuple(tuple(part.tokens.shape) for part in self.parts)

    def divided(self, group: ContextGroup) -> StepBatch:
        """This rank's part of every sequence, with its positions; documents stay those of the whole.

        Raises InputError if a length cannot be divided among the ranks.
        """
        if group.size == 1:
            return self
        chunks = 2 * group.size
        for _, length in self.shapes:
            if length % chunks:
                raise InputError(
                    f"A sequence of {length} tokens cannot be cut into {chunks} equal parts, 2 for each of the"
                    f" {group.size} context-parallel ranks: give sequences of a multiple of {chunks}."
                )
        return StepBatch([_own(part, group) for part in self.parts], self.checksum, self.counted)

    def micro_batches(
        self, *, scale: float, seed: int, cut: Cut = whole, counted: bool = True
    ) -> tuple[list[Tensor], list[MicroBatch]]:
        """Inputs and what goes with them, or of as many slices of each.

        Args:
            scale: Factor of every loss.
            seed: Every dropout mask follows from it.
            cut: The tokens of each slice of a sequence, by its length.
            counted: Whether ledgers count what slices leave for each other.

        Raises:
            InputError: If a sequence cannot be cut.
        """
        parts = [piece for part in self.parts for piece in _sliced(part, cut, counted)]
        seeds = (zlib.crc32(f"{seed} {j}".encode()) for j in range(len(parts)))
        return [rows.tokens for rows, _ in parts], [
            MicroBatch(rows.targets, scale, s, None, rows.positions, rows.documents, rows.loss_inputs, place)
            for (rows, place), s in zip(parts, seeds, strict=True)
        ]


@dataclass(frozen=True)
class BatchFormat:
    """The entries of a batch that a plan's model takes."""

    has_positions: bool = False
    """True if its units take positions and documents."""
    has_masks: bool = False
    """True if they may hide tokens, too."""
    loss_entries: tuple[str, ...] = ()
    """Names of the entries that the loss asks for."""
    vocabulary: int | None = None
    """Tokens that the model has; None: its modules are the user's own, and take any inputs."""
    positions: int | None = None
    """Positions that the model has learned; None: it has none of its own, and takes any length."""


def read_batch(
    batch: Batch, *, micro_batches: int, device: torch.device, accepted: BatchFormat | None = None
) -> StepBatch:
    """Check, move and cut a batch.

    `position_ids` may be any; as in transformers, where they do not continue by 1 a new document begins, and attention
    stays within documents, unless there is an `attention_mask`.  That one, [rows, length] of zeros and ones, hides
    tokens, whose targets must be -100, from all others.

    Args:
        batch: Tokens and targets (see `Batch`).
        micro_batches: How many the plan has.
        device: Where the tokens and targets go.
        accepted: What the model takes; None: neither positions nor masks.

    Raises:
        InputError: The batch has the wrong shape, cannot be divided, or has an entry that cannot be honoured.
    """
    read_one = partial(_read, accepted=accepted or BatchFormat())
    if isinstance(batch, Tensor | Mapping):
        read = [read_one(batch)]
        cut = read[0].cut(micro_batches)
    else:
        if len(batch) != micro_batches:
            raise InputError(
                f"A sequence of batches has one for each micro-batch: {micro_batches} for this plan, not {len(batch)}."
            )
        cut = read = [read_one(part) for part in batch]
    checksum = 0
    for rows in read:
        for tensor in (rows.tokens, rows.targets, rows.positions, rows.documents):
            checksum = checksum if tensor is None else _checksum(tensor, checksum)
    counted = sum(rows.counted for rows in read)
    return StepBatch([rows.each(lambda tensor: tensor.to(device)) for rows in cut], checksum, counted)


def _sliced(rows: TokenRows, cut: Cut, counted: bool) -> Iterator[tuple[TokenRows, SequenceSlice | None]]:
    """The slices of sequences, with the documents of the whole; whole sequences where there is one slice."""
    lengths = cut(rows.tokens.shape[1]) if rows.tokens.dim() > 1 else ()
    if len(lengths) < 2:
        yield rows, None
        return
    sequence = SlicedSequence(lengths, counted)
    for index, (begin, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        tokens, targets = (tensor[:, begin:end].clone() for tensor in (rows.tokens, rows.targets))
        positions = None if rows.positions is None else rows.positions[:, begin:end].clone()
        yield replace(rows, tokens=tokens, targets=targets, positions=positions), sequence.slice(index)


def check_entries(names: Iterable[str], owner: str, more: Sequence[str] = ()) -> None:
    """Raise InputError if one of them is no entry of a `Batch`, and none of `more`."""
    known = (*ENTRIES, *more)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise InputError(
            f"{owner} has an entry '{unknown}', which the runtime does not know: it knows {', '.join(known)}."
        )


def _own(rows: TokenRows, group: ContextGroup) -> TokenRows:
    positions = rows.positions
    if positions is None:
        positions = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)[None]
    tokens, targets, positions = (group.own(tensor, 1) for tensor in (rows.tokens, rows.targets, positions))
    return TokenRows(tokens, targets, positions, rows.documents)


def _read(batch: Entries, *, accepted: BatchFormat) -> TokenRows:
    loss_entries, any_shape = accepted.loss_entries, accepted.vocabulary is None
    missing = next((name for name in loss_entries if isinstance(batch, Tensor) or name not in batch), None)
    if missing is not None:
        raise InputError(f"The loss asks for '{missing}', which the batch does not have: give it as an entry.")
    if isinstance(batch, Tensor):
        if batch.dim() != 2 or batch.shape[1] < 2:
            raise InputError(f"A batch of tokens has shape [rows, length + 1], not {list(batch.shape)}.")
        if batch.is_floating_point():
            raise InputError("A batch of one tensor is tokens, which are whole numbers: give {'inputs', 'targets'}.")
        batch = {"input_ids": batch[:, :-1], "targets": batch[:, 1:]}
    elif any_shape and INPUTS in batch:
        batch = {**batch, "input_ids": batch[INPUTS]}
        batch.pop(INPUTS)
    check_entries(batch, "The batch", loss_entries)
    tokens, targets = _tokens_and_targets(batch, any_shape=any_shape)
    if accepted.vocabulary is not None:
        _check_tokens(tokens, targets, accepted.vocabulary)
    if accepted.positions is not None and tokens.shape[1] > accepted.positions:
        raise InputError(
            f"A sequence of {tokens.shape[1]} tokens is longer than the model's {accepted.positions} positions."
        )
    rows = TokenRows(
        tokens.contiguous(), targets.contiguous(), loss_inputs={name: batch[name] for name in loss_entries}
    )
    for name, tensor in rows.loss_inputs.items():
        if not tensor.dim() or len(tensor) != len(tokens):
            raise InputError(f"'{name}' must have {len(tokens)} rows, as 'input_ids' has, not {list(tensor.shape)}.")
    if "position_ids" in batch:
        rows = _with_positions(rows, batch["position_ids"], accepted, masked="attention_mask" in batch)
    if "attention_mask" in batch:
        rows = _with_mask(rows, batch["attention_mask"], allowed=accepted.has_masks)
    return rows


def _check_tokens(tokens: Tensor, targets: Tensor, vocabulary: int) -> None:
    """Refuse what is no token of the vocabulary: a kernel would fail on one rank alone, or read what is not its own."""
    known = targets[targets != IGNORED]
    for name, numbers in (("Token", tokens), ("Target", known)):
        if numbers.numel():
            lowest, highest = (int(number) for number in numbers.aminmax())
            if lowest < 0 or highest >= vocabulary:
                wrong = lowest if lowest < 0 else highest
                raise InputError(f"{name} {wrong} is not in the model's vocabulary of {vocabulary} tokens.")


def _part(tensor: Tensor, *, index: int, parts: int) -> Tensor:
    rows = len(tensor) // parts
    return tensor.narrow(0, index * rows, rows).clone()


def _tokens_and_targets(batch: Mapping[str, Tensor], *, any_shape: bool) -> tuple[Tensor, Tensor]:
    if "input_ids" not in batch:
        raise InputError("The batch has no entry 'input_ids'.")
    if ("labels" in batch) == ("targets" in batch):
        raise InputError(
            "The batch must have either 'labels' (the tokens themselves, as in transformers) or 'targets' (what each"
            " position is to predict)."
        )
    name = "labels" if "labels" in batch else "targets"
    tokens, labels = batch["input_ids"], batch[name]
    if not labels.is_floating_point():
        labels = labels.long()  # the one type of whole numbers that torch's losses take
    if any_shape and name == "targets":
        if not tokens.dim() or not labels.dim() or len(tokens) != len(labels):
            raise InputError(
                f"'{INPUTS}' and 'targets' must have as many rows, not shapes {list(tokens.shape)} and"
                f" {list(labels.shape)}."
            )
        return tokens, labels
    if tokens.dim() != 2 or tokens.shape != labels.shape:
        raise InputError(
            f"'input_ids' and '{name}' must both have shape [rows, length], not"
            f" {list(tokens.shape)} and {list(labels.shape)}."
        )
    return tokens, _next_labels(labels) if name == "labels" else labels


def _next_labels(labels: Tensor) -> Tensor:
    """The target of each position: the next one's label; the last position has none."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets


def _with_positions(rows: TokenRows, positions: Tensor, accepted: BatchFormat, *, masked: bool) -> TokenRows:
    """The rows with positions of their own; as they are if these are the usual ones.

    As in transformers, they tell documents apart only where no mask does.
    """
    length = rows.tokens.shape[1]
    usual = torch.arange(length, device=positions.device)
    if positions.shape[-1:] == (length,) and (positions == usual).all():
        return rows
    if not accepted.has_positions:
        raise InputError(
            f"The runtime counts positions by itself for this model: 'position_ids' must be 0 to {length - 1} in every"
            " row, or be left out."
        )
    if positions.shape not in (rows.tokens.shape, (1, length)) or bool((positions < 0).any()):
        raise InputError("'position_ids' must have shape [rows, length], and be 0 or more.")
    if accepted.positions is not None and int(positions.max()) >= accepted.positions:
        raise InputError(f"Position {int(positions.max())} is beyond the model's {accepted.positions} positions.")
    positions = positions.expand_as(rows.tokens).contiguous()
    if masked:
        return replace(rows, positions=positions)
    begins = positions[:, 1:] != positions[:, :-1] + 1
    documents = torch.nn.functional.pad(begins.cumsum(1), (1, 0))
    return replace(rows, positions=positions, documents=documents if begins.any() else None)


def _with_mask(rows: TokenRows, mask: Tensor, *, allowed: bool) -> TokenRows:
    """The rows with hidden tokens in documents of their own; as they are if nothing that counts sees them."""
    seen = mask != 0
    if mask.shape == rows.tokens.shape and seen.all():
        return rows
    if not allowed:
        raise InputError(
            "The runtime computes without attention masks for this model: 'attention_mask' must be all ones."
        )
    if mask.shape != rows.tokens.shape:
        raise InputError("'attention_mask' must have shape [rows, length].")
    if (rows.targets[~seen] != IGNORED).any():
        raise InputError(
            "A token that 'attention_mask' hides must predict nothing: give its target, or the label of the token after"
            " it, -100."
        )
    # No position attends to later ones: what is hidden at the end of a row is seen by hidden positions alone.
    if not (seen[:, 1:] & ~seen[:, :-1]).any():
        return rows
    documents = torch.zeros_like(rows.tokens) if rows.documents is None else rows.documents
    return replace(rows, documents=torch.where(seen, documents, -1))


def _checksum(tensor: Tensor, start: int = 0) -> int:
    return zlib.crc32(tensor.cpu().view(torch.uint8).numpy().data, start)
