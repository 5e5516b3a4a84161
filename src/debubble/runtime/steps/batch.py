"""Checks the batches of `Pipeline.step`, and splits them into micro-batches."""

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
"""Target of a token that does not count in the loss."""

Entries = Tensor | Mapping[str, Tensor]
"""A single batch, not a sequence of batches."""

Batch = Entries | Sequence[Entries]
"""Tokens [rows, length + 1], each to predict the next; or a mapping with `input_ids` and one of the following, [rows,
length] each, where -100 stands for no target:

* `labels`, as in transformers: `labels[r, t]` is the token at position t, which position t - 1 predicts (often equal to
  `input_ids`).
* `targets`: `targets[r, t]` is the token that position t predicts.

It may also have an `attention_mask` and `position_ids`, as in transformers: see `read_batch`.  A sequence of batches
has one per micro-batch, whose rows and lengths may differ.  A loss of your own may require more entries, with the
same number of rows (see `Loss`).

Modules of your own take `inputs` [rows, ...] and `targets` [rows, ...] of any shapes, such as images and labels.
"""

ENTRIES = ("input_ids", "labels", "targets", "attention_mask", "position_ids")
INPUTS = "inputs"
"""The inputs of a user's modules, for which `input_ids` is an alias."""
SliceLengths = Callable[[int], tuple[int, ...]]
"""Maps a sequence's length to the lengths of its slices."""


def one_slice(length: int) -> tuple[int, ...]:
    """Do not slice the sequence."""
    return (length,)


@dataclass(frozen=True)
class TokenRows:
    """Tokens and targets, [rows, length] each, of a step or a micro-batch.

    For a user's modules, inputs and targets [rows, ...].
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    """Position of each token, [rows or 1, length]; None: 0, 1, 2 and so on in every row."""
    documents: Tensor | None = None
    """Number of each token's document, to which its attention is limited; None: a row is a document."""
    loss_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Entries that the loss requires, [rows, ...] each, by name."""

    @property
    def counted(self) -> int:
        """Number of tokens that count in the loss."""
        return int((self.targets != IGNORED).sum())

    def split(self, micro_batches: int) -> list[TokenRows]:
        """Split into equal micro-batches with separate storages, so that each can be offloaded separately.

        Raises InputError if the rows cannot be divided.
        """
        if len(self.tokens) % micro_batches:
            raise InputError(
                f"A batch of {len(self.tokens)} rows cannot be cut into {micro_batches} equal micro-batches."
            )
        return [self.map(partial(_chunk, index=index, chunks=micro_batches)) for index in range(micro_batches)]

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenRows:
        """Apply a function to every tensor."""
        return TokenRows(
            change(self.tokens),
            change(self.targets),
            None if self.positions is None else change(self.positions),
            None if self.documents is None else change(self.documents),
            {name: change(tensor) for name, tensor in self.loss_inputs.items()},
        )


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one step."""

    rows: Sequence[TokenRows]
    """Tokens and targets per micro-batch."""
    checksum: int
    """Checksum of the batch, to compare ranks."""
    counted: int
    """Number of tokens of full sequences that count in the loss."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Rows and length of each micro-batch."""
        return tuple(tuple(rows.tokens.shape) for rows in self.rows)

    def shard(self, group: ContextGroup) -> StepBatch:
        """This rank's shard of every sequence, with its positions; documents are those of full sequences.

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
        return StepBatch([_shard(rows, group) for rows in self.rows], self.checksum, self.counted)

    def micro_batches(
        self, *, scale: float, seed: int, slices: SliceLengths = one_slice, counted: bool = True
    ) -> tuple[list[Tensor], list[MicroBatch]]:
        """Inputs and other arguments of all micro-batches, or of all their slices.

        Args:
            scale: Factor of every loss.
            seed: Seed of dropout masks.
            slices: Slices of a sequence, by its length.
            counted: Whether ledgers count the keys and values of slices.

        Raises:
            InputError: A sequence cannot be sliced.
        """
        sliced = [item for rows in self.rows for item in _slice(rows, slices, counted)]
        seeds = (zlib.crc32(f"{seed} {j}".encode()) for j in range(len(sliced)))
        return [rows.tokens for rows, _ in sliced], [
            MicroBatch(rows.targets, scale, s, None, rows.positions, rows.documents, rows.loss_inputs, sequence_slice)
            for (rows, sequence_slice), s in zip(sliced, seeds, strict=True)
        ]


@dataclass(frozen=True)
class BatchFormat:
    """The entries of a batch that a plan's model supports."""

    has_positions: bool = False
    """True if its units support positions and documents."""
    has_masks: bool = False
    """True if they support masks that hide tokens."""
    loss_entries: tuple[str, ...] = ()
    """Names of the entries that the loss requires."""
    vocabulary: int | None = None
    """Vocabulary size; None: the modules are the user's, and take any inputs."""
    positions: int | None = None
    """Number of learned positions; None: the model has none, and takes any length."""


def read_batch(
    batch: Batch, *, micro_batches: int, device: torch.device, accepted: BatchFormat | None = None
) -> StepBatch:
    """Check a batch, move it to the device, and split it into micro-batches.

    As in transformers, a new document begins where `position_ids` do not increase by 1, and attention is limited to
    documents, unless there is an `attention_mask`.  A mask, [rows, length] of zeros and ones, hides tokens from all
    others; their targets must be -100.

    Args:
        batch: Tokens and targets (see `Batch`).
        micro_batches: The plan's number of micro-batches.
        device: Device of the result.
        accepted: What the model supports; None: neither positions nor masks.

    Raises:
        InputError: The batch has the wrong shape, cannot be divided, or has an unsupported entry.
    """
    read_one = partial(_read, accepted=accepted or BatchFormat())
    if isinstance(batch, Tensor | Mapping):
        read = [read_one(batch)]
        split = read[0].split(micro_batches)
    else:
        if len(batch) != micro_batches:
            raise InputError(
                f"A sequence of batches has one for each micro-batch: {micro_batches} for this plan, not {len(batch)}."
            )
        split = read = [read_one(entries) for entries in batch]
    checksum = 0
    for rows in read:
        for tensor in (rows.tokens, rows.targets, rows.positions, rows.documents):
            checksum = checksum if tensor is None else _checksum(tensor, checksum)
    counted = sum(rows.counted for rows in read)
    return StepBatch([rows.map(lambda tensor: tensor.to(device)) for rows in split], checksum, counted)


def _slice(rows: TokenRows, slices: SliceLengths, counted: bool) -> Iterator[tuple[TokenRows, SequenceSlice | None]]:
    """The slices of sequences, with the documents of full sequences; None for a single slice."""
    lengths = slices(rows.tokens.shape[1]) if rows.tokens.dim() > 1 else ()
    if len(lengths) < 2:
        yield rows, None
        return
    sequence = SlicedSequence(lengths, counted)
    for index, (begin, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        tokens, targets = (tensor[:, begin:end].clone() for tensor in (rows.tokens, rows.targets))
        positions = None if rows.positions is None else rows.positions[:, begin:end].clone()
        yield replace(rows, tokens=tokens, targets=targets, positions=positions), sequence.slice(index)


def check_entries(names: Iterable[str], owner: str, more: Sequence[str] = ()) -> None:
    """Raise InputError if a name is neither an entry of a `Batch` nor one of `more`."""
    known = (*ENTRIES, *more)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise InputError(
            f"{owner} has an entry '{unknown}', which the runtime does not know: it knows {', '.join(known)}."
        )


def _shard(rows: TokenRows, group: ContextGroup) -> TokenRows:
    positions = rows.positions
    if positions is None:
        positions = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)[None]
    tokens, targets, positions = (group.local_chunks(tensor, 1) for tensor in (rows.tokens, rows.targets, positions))
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
    """Refuse tokens outside the vocabulary: a kernel would fail on one rank only, or read out of bounds."""
    known = targets[targets != IGNORED]
    for name, numbers in (("Token", tokens), ("Target", known)):
        if numbers.numel():
            lowest, highest = (int(number) for number in numbers.aminmax())
            if lowest < 0 or highest >= vocabulary:
                wrong = lowest if lowest < 0 else highest
                raise InputError(f"{name} {wrong} is not in the model's vocabulary of {vocabulary} tokens.")


def _chunk(tensor: Tensor, *, index: int, chunks: int) -> Tensor:
    rows = len(tensor) // chunks
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
        labels = labels.long()  # the only integer dtype that torch's losses support
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
    """The target of each position: the next position's label; the last position has none."""
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets


def _with_positions(rows: TokenRows, positions: Tensor, accepted: BatchFormat, *, masked: bool) -> TokenRows:
    """Set positions, unless they are the default ones, and the documents that they imply, unless there is a mask."""
    length = rows.tokens.shape[1]
    default = torch.arange(length, device=positions.device)
    if positions.shape[-1:] == (length,) and (positions == default).all():
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
    """Put hidden tokens into separate documents, unless no token that counts would attend to them."""
    visible = mask != 0
    if mask.shape == rows.tokens.shape and visible.all():
        return rows
    if not allowed:
        raise InputError(
            "The runtime computes without attention masks for this model: 'attention_mask' must be all ones."
        )
    if mask.shape != rows.tokens.shape:
        raise InputError("'attention_mask' must have shape [rows, length].")
    if (rows.targets[~visible] != IGNORED).any():
        raise InputError(
            "A token that 'attention_mask' hides must predict nothing: give its target, or the label of the token after"
            " it, -100."
        )
    # Attention is causal: only hidden positions attend to hidden ones at the end of a row.
    if not (visible[:, 1:] & ~visible[:, :-1]).any():
        return rows
    documents = torch.zeros_like(rows.tokens) if rows.documents is None else rows.documents
    return replace(rows, documents=torch.where(visible, documents, -1))


def _checksum(tensor: Tensor, start: int = 0) -> int:
    return zlib.crc32(tensor.cpu().view(torch.uint8).numpy().data, start)
