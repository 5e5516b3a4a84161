"""Sequences of different lengths: their histogram, and the micro-batches of a typical step.

Each micro-batch has at most `micro_batch_size` sequences, one after the other without padding, and costs in proportion
to its tokens.  For activations and linear layers that is exact.  Attention's time grows with the square of a length, so
that the time of what is shorter than the longest is overrated, and the memory is not underrated.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from debubble.files import read_file
from debubble.ir import InputError

Histogram = Mapping[int, int]
"""Sequences by their number of tokens."""

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
) -> list[float]:
    """The micro-batches of a step whose sequences are the quantiles of a histogram, balanced by their tokens.

    The longest sequences are assigned first, each to the micro-batch with the fewest tokens that has a place left.  Of
    as
    many replicas the micro-batches go, longest first, one to each; of every round the longest counts.

    Args:
        histogram: Sequences by their number of tokens.
        micro_batches: Of each pipeline and step.
        micro_batch_size: Sequences that a micro-batch has.
        sequence_length: Tokens that a sequence may have.
        replicas: Pipelines that share the step.

    Returns:
        Per micro-batch of a pipeline, its tokens over those of a full one, longest first.

    Raises:
        InputError: If a sequence is longer than `sequence_length`.
    """
    longest = max(histogram)
    if longest > sequence_length:
        raise InputError(
            f"The longest sequence has {longest} tokens, but --sequence-length is {sequence_length}; raise it, or cut"
            " the sequences."
        )
    bins = micro_batches * replicas
    lengths = _quantiles(histogram, bins * micro_batch_size)
    open_bins = [(0, k, micro_batch_size) for k in range(bins)]
    full: list[int] = []
    for length in sorted(lengths, reverse=True):
        tokens, k, places = heapq.heappop(open_bins)
        if places > 1:
            heapq.heappush(open_bins, (tokens + length, k, places - 1))
        else:
            full.append(tokens + length)
    full.sort(reverse=True)
    return [tokens / (micro_batch_size * sequence_length) for tokens in full[::replicas]]


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


def orders_of(scales: Sequence[float]) -> list[tuple[float, ...]]:
    """Orders of micro-batches that may be fast: longest first, last, in the middle, and at both ends.

    Args:
        scales: Their sizes, in any order.
    """
    down = sorted(scales, reverse=True)
    middle = (*down[1::2][::-1], *down[::2])
    ends = (*down[::2], *down[1::2][::-1])
    return list(dict.fromkeys((tuple(down), tuple(down[::-1]), middle, ends)))
