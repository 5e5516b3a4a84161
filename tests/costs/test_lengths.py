"""Lengths of sequences: files, and the micro-batches of a typical step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.costs.lengths import read_lengths, typical_step
from debubble.ir import InputError


@pytest.mark.parametrize(
    "text",
    [
        '{"512": 2, "1024": 1}',
        "[1024, 512, 512]",
        "512\n1024\n\n512\n",
        '{"length": 1024}\n{"length": 512}\n{"length": 512}\n',
        "\n".join(f'{{"input_ids": {[1] * length}}}' for length in (512, 1024, 512)),
    ],
)
def test_every_form_of_lengths_file_is_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    assert read_lengths(file) == {512: 2, 1024: 1}


@pytest.mark.parametrize("text", ["", "a text", '{"text": "a text"}', "[-1]", "[1.5]"])
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths"
    file.write_text(text)
    with pytest.raises(InputError, match="give a JSON object of lengths and counts"):
        read_lengths(file)


def test_a_step_of_single_sequences_has_the_quantiles() -> None:
    sizes = typical_step({100: 1, 200: 2, 400: 1}, micro_batches=4, micro_batch_size=1, sequence_length=400)
    assert sizes == [(1, 1), (0.5, 0.5), (0.5, 0.5), (0.25, 0.25)]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({"micro_batch_size": 2}, [500 / 800, 500 / 800]), ({"micro_batch_size": 1, "replicas": 2}, [1, 0.5])],
    ids=["about as many tokens in each", "the longest of replicas counts"],
)
def test_sequences_are_balanced_over_micro_batches(options: dict[str, int], tokens: list[float]) -> None:
    histogram = {100: 1, 200: 1, 300: 1, 400: 1}
    sizes = typical_step(histogram, micro_batches=2, sequence_length=400, **options)
    assert [size.tokens for size in sizes] == tokens


def test_tokens_attend_to_half_of_their_sequence() -> None:
    (size,) = typical_step({300: 1, 100: 1}, micro_batches=1, micro_batch_size=2, sequence_length=400)
    pairs = sum(n + 1 for length in (300, 100) for n in range(length))
    assert size.keys == pytest.approx(pairs / 400 / 200, rel=0.01)


def test_a_sequence_above_the_sequence_length_is_refused() -> None:
    with pytest.raises(InputError, match="401 tokens, but --sequence-length is 400"):
        typical_step({401: 1}, micro_batches=2, micro_batch_size=2, sequence_length=400)


@given(
    histogram=st.dictionaries(st.integers(1, 64), st.integers(1, 9), min_size=1),
    m=st.integers(1, 8),
    size=st.integers(1, 4),
    replicas=st.integers(1, 3),
)
def test_no_micro_batch_is_longer_than_a_full_one(histogram: dict[int, int], m: int, size: int, replicas: int) -> None:
    sizes = typical_step(
        histogram, micro_batches=m, micro_batch_size=size, sequence_length=64, replicas=replicas
    )  # fmt: skip
    assert len(sizes) == m
    assert all(0 < size.tokens <= 1 and 0 < size.keys <= 1 for size in sizes)
    assert [size.tokens for size in sizes] == sorted((size.tokens for size in sizes), reverse=True)
