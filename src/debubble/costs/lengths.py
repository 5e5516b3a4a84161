"""Sequences of different lengths: their histogram, and the micro-batches of a typical step.

Each micro-batch has at most `micro_batch_size` sequences, one after the other without padding.  Its activations and
linear layers cost in proportion to its tokens, its attention in proportion to the keys that these attend to: half of
their own sequence's on average.
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
"""Sequences by their number of tokens."""


class MicroBatchSize(NamedTuple):
    """The size of a micro-batch.

    Attributes:
        tokens: Its tokens over those of a full one.
        keys: The keys that a token attends to on average, over those in a sequence of full length.
    """

    tokens: float
    keys: float = 1.0

    @staticmethod
    def of(lengths: Sequence[int], *, micro_batch_size: int, sequence_length: int) -> MicroBatchSize:
        """The size of a micro-batch of sequences of these lengths, where full ones have `sequence_length` tokens."""
        return MicroBatchSize(
            tokens=sum(lengths) / (micro_batch_size * sequence_length),
            keys=sum(length**2 for length in lengths) / (sum(lengths) * sequence_length),
        )


_FORMS = (
    "a JSON object of lengths and counts, a list of lengths, one length in each line, or JSON lines with `input_ids`"
)


def read_lengths(path: Path) -> dict[int, int]:
    """Read how long the sequences of a data set are.

    Args:
        path: A JSON object `{"length": count}`, a JSON list of lengths, a text file with a length in each line, or JSON
            lines whose objects have `input_ids` (the tokens) or `length`.

    Returns:
        Sequences by their number of tokens, shortest first.

    Raises:
        InputError: If the file cannot be read as one of these, or has no sequence.
    """
    text = read_file(path, what="lengths file").decode(errors="replace")
    try:
        counts = _counted(_entries(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f"The lengths in {path} are not readable: give {_FORMS}.") from None
    if not counts:
        raise InputError(f"There is no sequence in {path}: give {_FORMS}.")
    return counts


def checked_lengths(histogram: Histogram) -> dict[int, int]:
    """The histogram, shortest first; raises InputError if it is none, or has no sequence."""
    try:
        counts = _counted(histogram.items())
    except (ValueError, TypeError, AttributeError):
        counts = {}
    if not counts:
        raise InputError("Lengths are a file, or a number of sequences for each number of tokens, such as {2048: 10}.")
    return counts


def _counted(entries: Iterable[tuple[float, float]]) -> dict[int, int]:
    """Sequences by their number of tokens; none if there are none.  Raises ValueError for what counts nothing."""
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

    The micro-batches (see `packed`) go, longest first, one to each replica in turn; of every round the longest counts.

    Args:
        histogram: Sequences by their number of tokens.
        micro_batches: Of each pipeline and step.
        micro_batch_size: Sequences that a micro-batch has.
        sequence_length: Tokens that a sequence may have.
        replicas: Pipelines that share the step.

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
        MicroBatchSize.of(
            [lengths[at] for at in places], micro_batch_size=micro_batch_size, sequence_length=sequence_length
        )
        for places in full[::replicas]
    ]


def packed(lengths: Sequence[int], *, micro_batches: int) -> list[list[int]]:
    """Places of sequences, assigned to micro-batches of equally many; the micro-batch with the most tokens first.

    The longest sequences are assigned first, each to the micro-batch with the fewest tokens that has a place left.
    """
    size = len(lengths) // micro_batches
    # The numbers put micro-batches of equally many tokens in order.
    unfilled: list[tuple[int, int, list[int]]] = [(0, k, []) for k in range(micro_batches)]
    full: list[tuple[int, list[int]]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        tokens, k, places = heapq.heappop(unfilled)
        places.append(place)
        if len(places) < size:
            heapq.heappush(unfilled, (tokens + lengths[place], k, places))
        else:
            full.append((tokens + lengths[place], places))
    full.sort(key=lambda each: each[0], reverse=True)
    return [places for _, places in full]


def _quantiles(histogram: Histogram, count: int) -> list[int]:
    """Choose as many lengths as asked for, at even distances through the sorted sequences."""
    total, at, seen = sum(histogram.values()), 0, 0
    lengths: list[int] = []
    for length, number in sorted(histogram.items()):
        seen += number
        while at < count and (2 * at + 1) * total <= 2 * count * seen:
            lengths.append(length)
            at += 1
    return lengths


def orders_of(sizes: Sequence[MicroBatchSize]) -> list[tuple[MicroBatchSize, ...]]:
    """Orders of micro-batches that may be fast: longest first, last, in the middle, and at both ends.

    Args:
        sizes: Their sizes, in any order.
    """
    down = sorted(sizes, reverse=True)
    middle = (*down[1::2][::-1], *down[::2])
    ends = (*down[::2], *down[1::2][::-1])
    return list(dict.fromkeys((tuple(down), tuple(down[::-1]), middle, ends)))
