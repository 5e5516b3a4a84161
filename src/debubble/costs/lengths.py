"""Sequences of different lengths: their histogram, and the micro-batches of a typical step.

A micro-batch packs at most `micro_batch_size` sequences without padding.  Its activations and linear layers cost in
proportion to its tokens, its attention in proportion to the keys that they attend to: on average half of the tokens of
their own sequence.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from debubble.files import read_file
from debubble.ir import InputError

Histogram = Mapping[int, int]
"""Number of tokens -> number of sequences."""


class MicroBatchSize(NamedTuple):
    """The size of a micro-batch, relative to one of sequences of full length.

    Attributes:
        tokens: Its tokens, over those of a full micro-batch.
        keys: The keys that a token attends to on average, over those in a sequence of full length.
    """

    tokens: float
    keys: float = 1.0

    @staticmethod
    def from_lengths(lengths: Sequence[int], *, micro_batch_size: int, sequence_length: int) -> MicroBatchSize:
        """The size of a micro-batch of sequences of these lengths; a sequence of full length has `sequence_length`."""
        return MicroBatchSize(
            tokens=sum(lengths) / (micro_batch_size * sequence_length),
            keys=sum(length**2 for length in lengths) / (sum(lengths) * sequence_length),
        )


_FORMS = (
    "a JSON object of lengths and counts, a list of lengths, one length in each line, or JSON lines with `input_ids`"
)


def read_lengths(path: Path) -> dict[int, int]:
    """Read the lengths of a data set's sequences.

    Args:
        path: A JSON object `{"length": count}`, a JSON list of lengths, a text file with a length in each line, or JSON
            lines whose objects have `input_ids` (the tokens) or `length`.

    Returns:
        Sequences by their number of tokens, shortest first.

    Raises:
        InputError: If the file cannot be read as one of these, or has no sequence.
    """
    text = read_file(path, kind="lengths file").decode(errors="replace")
    try:
        counts = _counted(_entries(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f"The lengths in {path} are not readable: give {_FORMS}.") from None
    if not counts:
        raise InputError(f"There is no sequence in {path}: give {_FORMS}.")
    return counts


def checked_lengths(histogram: Histogram) -> dict[int, int]:
    """The histogram, shortest first; raises InputError if it is not a histogram, or has no sequence."""
    try:
        counts = _counted(histogram.items())
    except (ValueError, TypeError, AttributeError):
        counts = {}
    if not counts:
        raise InputError("Lengths are a file, or a number of sequences for each number of tokens, such as {2048: 10}.")
    return counts


def _counted(entries: Iterable[tuple[float, float]]) -> dict[int, int]:
    """The histogram of (length, count) pairs, {} if it has no sequence; raises ValueError for a wrong number."""
    counts: dict[int, int] = {}
    for length, count in entries:
        if length < 1 or count < 0 or length != int(length) or count != int(count):
            raise ValueError
        counts[int(length)] = counts.get(int(length), 0) + int(count)
    return dict(sorted(counts.items())) if sum(counts.values()) else {}


def _entries(text: str) -> Iterator[tuple[float, float]]:
    try:
        content = json.loads(text)
    except ValueError:
        content = [json.loads(line) for line in text.splitlines() if line.strip()]
    match content:
        case {"input_ids": _} | {"length": _}:
            yield _length(content), 1
        case dict():
            yield from ((float(length), count) for length, count in content.items())
        case list():
            yield from ((_length(entry), 1) for entry in content)
        case _:
            yield _length(content), 1


def _length(entry: Any) -> float:
    if isinstance(entry, dict):
        return len(entry["input_ids"]) if "input_ids" in entry else float(entry["length"])
    return float(entry)


def typical_step(
    histogram: Histogram, *, micro_batches: int, micro_batch_size: int, sequence_length: int, replicas: int = 1
) -> list[MicroBatchSize]:
    """The micro-batches of a step whose sequences are the quantiles of a histogram, balanced by their tokens.

    The micro-batches (see `packed`), longest first, are assigned to replicas round-robin; of each round the longest is
    returned, as all replicas wait for it.

    Args:
        histogram: Number of tokens -> number of sequences.
        micro_batches: Micro-batches of one pipeline in a step.
        micro_batch_size: Sequences of a micro-batch.
        sequence_length: Maximum tokens of a sequence.
        replicas: Number of data-parallel pipelines.

    Returns:
        The micro-batches of a pipeline, longest first.

    Raises:
        InputError: If a sequence is longer than `sequence_length`.
    """
    longest = max(histogram)
    if longest > sequence_length:
        raise InputError(
            f"The longest sequence has {longest} tokens, but --sequence-length is {sequence_length}; raise it, or cut"
            " the sequences."
        )
    lengths = _quantiles(histogram, micro_batches * replicas * micro_batch_size)
    full = packed(lengths, micro_batches=micro_batches * replicas)
    return [
        MicroBatchSize.from_lengths(
            [lengths[i] for i in indices], micro_batch_size=micro_batch_size, sequence_length=sequence_length
        )
        for indices in full[::replicas]
    ]


def packed(lengths: Sequence[int], *, micro_batches: int) -> list[list[int]]:
    """Indices of the sequences of every micro-batch, the one with the most tokens first; all have equally many.

    Greedy: the longest remaining sequence goes to the unfilled micro-batch with the fewest tokens.
    """
    size = len(lengths) // micro_batches
    # The index k breaks ties between micro-batches with equal numbers of tokens.
    unfilled: list[tuple[int, int, list[int]]] = [(0, k, []) for k in range(micro_batches)]
    full: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens, k, indices = heapq.heappop(unfilled)
        indices.append(index)
        if len(indices) < size:
            heapq.heappush(unfilled, (tokens + lengths[index], k, indices))
        else:
            full.append((tokens + lengths[index], indices))
    full.sort(key=lambda entry: entry[0], reverse=True)
    return [indices for _, indices in full]


def _quantiles(histogram: Histogram, count: int) -> list[int]:
    """The lengths at `count` evenly spaced quantiles of the sorted sequences."""
    total, cumulative = sum(histogram.values()), 0
    lengths: list[int] = []
    for length, number in sorted(histogram.items()):
        cumulative += number
        while len(lengths) < count and (2 * len(lengths) + 1) * total <= 2 * count * cumulative:
            lengths.append(length)
    return lengths


def orders_of(sizes: Sequence[MicroBatchSize]) -> list[tuple[MicroBatchSize, ...]]:
    """Candidate orders of micro-batches: the longest first, last, in the middle, and at both ends.

    Args:
        sizes: Their sizes, in any order.
    """
    down = sorted(sizes, reverse=True)
    middle = (*down[1::2][::-1], *down[::2])
    ends = (*down[::2], *down[1::2][::-1])
    return list(dict.fromkeys((tuple(down), tuple(down[::-1]), middle, ends)))
