from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from debubble.ir import InputError
from debubble.training.checks import check
from debubble.training.data.datasets import TextSamples
from debubble.training.data.text import Sequences, load_tokens, shuffled_indices
from debubble.training.data.tokenizer import HfTokenizer
from debubble.training.options import TrainOptions, samples_of
from tests.support.runtime_cases import reference_gradients
from tests.support.training_cases import train_alone


def test_files_of_a_directory_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bb")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "picture.bin").write_bytes(b"x\0y")
    assert load_tokens(tmp_path).tolist() == [97, 0, 98, 98, 0]


def test_the_default_data_is_python_source_without_zeros_inside(tmp_path: Path) -> None:
    text = load_tokens().tobytes()
    assert b"def __init__(self" in text
    assert len(text) > 1_000_000


@pytest.mark.parametrize(("name", "message"), [("missing", "no data file"), ("empty", "holds no text")])
def test_missing_data_is_one_sentence(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match=message):
        load_tokens(tmp_path / name)


def sequences(size: int, length: int, seed: int = 0) -> Sequences:
    return Sequences(tokens=np.arange(size, dtype=np.uint8), sequence_length=length, seed=seed)


def test_a_sample_is_a_window_and_the_token_after_it() -> None:
    tokens = sequences(41, 8).batch(0, count=5)
    assert tokens.shape == (5, 9)
    assert (np.diff(tokens) == 1).all()
    assert sorted(tokens[:, 0]) == [0, 8, 16, 24, 32]


def test_epoch_has_every_window_once_in_a_new_order() -> None:
    data = sequences(200, 4)
    first, second = (data.batch(epoch * 49, count=49) for epoch in (0, 1))
    assert sorted(first[:, 0]) == sorted(second[:, 0]) == list(range(0, 196, 4))
    assert (first != second).any()


def test_epoch_order_is_numpys_permutation_of_its_seed() -> None:
    """Checkpoints rely on this: they store only the number of samples seen."""
    orders = [np.random.default_rng([5, epoch]).permutation(7).tolist() for epoch in range(4)]
    order_of_epochs = [place for order in orders for place in order]
    for first, count in [(0, 28), (5, 4), (3, 20), (21, 7)]:
        actual = shuffled_indices(first, count=count, per_epoch=7, seed=5)
        assert actual.tolist() == order_of_epochs[first : first + count]


def test_data_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(InputError, match="too few for one sequence of 8"):
        sequences(8, 8)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """A word tokenizer as Hugging Face stores one."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[?]": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, "[?]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer").mkdir()
    made.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return tmp_path / "tokenizer"


@pytest.fixture
def texts(tmp_path: Path) -> Any:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "1.txt").write_text("a b c")
    (tmp_path / "texts" / "2.txt").write_text("c d")
    (tmp_path / "texts" / "empty.txt").touch()
    return tmp_path / "texts"


def test_texts_end_with_the_token_of_the_config_or_the_models(texts: Any, tokenizer: Any) -> None:
    assert load_tokens(texts, HfTokenizer(tokenizer)).tolist() == [2, 3, 4, 4, 0]
    assert load_tokens(texts, HfTokenizer(tokenizer, end=1)).tolist() == [2, 3, 4, 1, 4, 0, 1]
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    expected = [2, 3, 4, 1, 4, 0, 1]
    assert load_tokens(texts, HfTokenizer(tokenizer, end=99)).tolist() == expected
    assert load_tokens(texts, HfTokenizer(tokenizer / "tokenizer.json")).tolist() == expected


def test_tokens_are_cached_until_a_file_changes(
    texts: Any, tokenizer: Any, own_cache_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(texts.parent / "cache"))
    cache = texts.parent / "cache" / "debubble" / "tokens"
    load_tokens(texts, HfTokenizer(tokenizer))
    (first,) = cache.iterdir()
    load_tokens(texts, HfTokenizer(tokenizer))
    assert list(cache.iterdir()) == [first]
    assert first.suffix == ".uint16"
    (texts / "2.txt").write_text("c d a")
    assert load_tokens(texts, HfTokenizer(tokenizer)).tolist() == [2, 3, 4, 4, 0, 2]
    assert len(list(cache.iterdir())) == 2


def test_long_text_is_tokenized_in_pieces_of_lines(texts: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("debubble.training.data.tokenizer.PIECE_CHARACTERS", 7)
    (texts / "2.txt").write_text("a b c\n" * 5 + "b")
    assert load_tokens(texts / "2.txt", HfTokenizer(tokenizer)).tolist() == [2, 3, 4] * 5 + [3]


def test_invalid_tokenizer_is_one_sentence(texts: Any) -> None:
    with pytest.raises(InputError, match=r"1\.txt has no tokenizer that can be read"):
        load_tokens(texts, HfTokenizer(texts / "1.txt"))


def test_positions_of_separate_texts_count_from_their_beginning() -> None:
    sequences = Sequences(tokens=np.array([5, 0, 6, 7, 0, 8, 9]), sequence_length=6)
    batch = TextSamples(sequences, separator=0).batch(0, count=1)
    assert not isinstance(batch, torch.Tensor)
    assert batch["input_ids"].tolist() == [[5, 0, 6, 7, 0, 8]]
    assert batch["targets"].tolist() == [[0, 6, 7, 0, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]


@pytest.mark.usefixtures("process_group")
def test_run_on_separate_texts_matches_one_process(plan_file: Any, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for i in range(30):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(f"{i} green bottles, hanging on the wall")
    options = TrainOptions(plan=plan_file(1), data=tmp_path / "texts", steps=1, warmup=1, separate_texts=True)
    plan = check(options)
    first = samples_of(options, plan).batch(0, count=4)
    expected, _ = reference_gradients(plan.model, first, micro_batches=4, dtype=torch.float32)
    assert train_alone(options).reports[0].loss == pytest.approx(float(expected), rel=1e-6)
    together = train_alone(replace(options, separate_texts=False)).reports[0].loss
    assert together != pytest.approx(float(expected), rel=1e-6)


def test_separate_texts_of_a_dataset_are_refused(plan_file: Any) -> None:
    with pytest.raises(InputError, match="give the items of a --dataset 'position_ids'"):
        check(TrainOptions(plan=plan_file(1), dataset="json:loads", separate_texts=True))
