"""Batches are read from tokens, labels (as in transformers), targets, masks and positions."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.runtime.steps.batch import BatchFormat, read_batch
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import (
    assert_gradients,
    assert_same_gradients,
    gradients_of,
    plan_of,
    run_threads,
    tokens_of,
)
from tests.support.tiny_models import GEMMA2, GPT2_UNTIED, LLAMA, MIXTRAL

TOKENS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
ONES = torch.ones(2, 4, dtype=torch.long)
ENDS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
"""The second row ends after two tokens."""


def read(batch: Any, **arguments: Any) -> Any:
    """Read a batch as one micro-batch."""
    (rows,) = step_batch(batch, **arguments).rows
    return rows


def step_batch(batch: Any, **arguments: Any) -> Any:
    return read_batch(batch, micro_batches=1, device=torch.device("cpu"), accepted=BatchFormat(**arguments))


def test_labels_and_targets_shift_tokens_differently() -> None:
    by_labels = read({"input_ids": TOKENS, "labels": TOKENS})
    by_targets = read({"input_ids": TOKENS, "targets": TOKENS})
    assert by_labels.targets.tolist() == [[6, 7, 8, -100], [2, 3, 4, -100]]
    assert by_targets.targets.tolist() == TOKENS.tolist()


def test_checksum_covers_all_entries_in_any_form() -> None:
    checksum = step_batch(TOKENS).checksum
    shifted = {"input_ids": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
    packed = {**shifted, "position_ids": torch.tensor([[0, 1, 0]])}
    assert step_batch(shifted).checksum == checksum
    assert step_batch({"input_ids": TOKENS[:, :-1], "targets": TOKENS[:, :-1]}).checksum != checksum
    assert step_batch(TOKENS.flip(0)).checksum != checksum
    assert step_batch(packed, has_positions=True).checksum != checksum


@pytest.mark.parametrize("takes", [False, True])
def test_a_mask_of_ones_and_the_usual_positions_change_nothing(takes: bool) -> None:
    more = {"attention_mask": ONES.bool(), "position_ids": torch.arange(4).expand(2, 4)}
    rows = read({"input_ids": TOKENS, "labels": TOKENS, **more}, has_positions=takes, has_masks=takes)
    assert rows.tokens.tolist() == TOKENS.tolist()
    assert rows.positions is None
    assert rows.documents is None


def test_documents_start_where_positions_restart() -> None:
    rows = read(
        {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.tensor([[0, 1, 0, 1]])}, has_positions=True
    )
    assert rows.positions.tolist() == [[0, 1, 0, 1]] * 2
    assert rows.documents.tolist() == [[0, 0, 1, 1]] * 2


def test_masked_positions_do_not_start_documents() -> None:
    positions = torch.tensor([[0, 1, 0, 1]])
    batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": positions, "attention_mask": ONES}
    rows = read(batch, has_positions=True, has_masks=True)
    assert rows.positions.tolist() == [[0, 1, 0, 1]] * 2
    assert rows.documents is None


def test_custom_modules_take_inputs_of_any_shape() -> None:
    images, labels = torch.rand(4, 3, 5, 5), torch.tensor([1, 0, 2, -100], dtype=torch.int32)
    batch = read_batch({"inputs": images, "targets": labels}, micro_batches=2, device=torch.device("cpu"))
    assert [rows.tokens.shape for rows in batch.rows] == [(2, 3, 5, 5)] * 2
    assert [rows.targets.tolist() for rows in batch.rows] == [[1, 0], [2, -100]]
    assert batch.counted == 3
    with pytest.raises(InputError, match="as many rows"):
        step_batch({"inputs": images, "targets": labels[:3]})


def test_float_tensor_is_refused_as_tokens() -> None:
    with pytest.raises(InputError, match="which are whole numbers"):
        read(torch.zeros(2, 4))


def test_more_positions_than_the_model_has_learned_are_refused() -> None:
    with pytest.raises(InputError, match="4 tokens is longer than the model's 3 positions"):
        read({"input_ids": TOKENS, "targets": TOKENS}, positions=3, vocabulary=9)
    entries = {"input_ids": TOKENS, "targets": TOKENS, "position_ids": torch.arange(1, 5)[None]}
    with pytest.raises(InputError, match="Position 4 is beyond the model's 4 positions"):
        read(entries, has_positions=True, positions=4, vocabulary=9)


@pytest.mark.parametrize(
    ("tokens", "targets", "message"),
    [
        ([[1, 9]], [[1, 2]], "Token 9 is not in the model's vocabulary of 9"),
        ([[1, -1]], [[1, 2]], "Token -1 is not"),
        ([[1, 2]], [[-100, 9]], "Target 9 is not"),
        ([[1, 2]], [[-100, -1]], "Target -1 is not"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(tokens: Any, targets: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        step_batch({"input_ids": torch.tensor(tokens), "targets": torch.tensor(targets)}, vocabulary=9)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"attention_mask": ENDS}, "hides must predict nothing"),
        ({"attention_mask": ONES[:, None, None]}, r"'attention_mask' must have shape \[rows, length\]"),
        ({"position_ids": torch.arange(3)}, r"'position_ids' must have shape \[rows, length\]"),
        ({"position_ids": torch.arange(-1, 3).expand(2, 4)}, "0 or more"),
    ],
)
def test_meaningless_entries_are_refused(entries: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read({"input_ids": TOKENS, "labels": TOKENS, **entries}, has_positions=True, has_masks=True)


def test_an_unknown_model_takes_neither_padding_nor_positions() -> None:
    labels = torch.where(ENDS == 1, TOKENS, -100)
    with pytest.raises(InputError, match="for this model: 'attention_mask' must be all ones"):
        read({"input_ids": TOKENS, "labels": labels, "attention_mask": ENDS})
    with pytest.raises(InputError, match="for this model: 'position_ids' must be 0 to 3"):
        read({"input_ids": TOKENS, "labels": labels, "position_ids": torch.arange(1, 5).expand(2, 4)})


def test_sequence_of_batches_matches_micro_batches() -> None:
    batch = read_batch([TOKENS, TOKENS[:1, :2]], micro_batches=2, device=torch.device("cpu"))
    assert batch.shapes == ((2, 3), (1, 1))
    with pytest.raises(InputError, match="3 for this plan, not 2"):
        read_batch([TOKENS, TOKENS], micro_batches=3, device=torch.device("cpu"))


def padded(rows: int = 4, length: int = 8) -> Any:
    """Rows of different lengths with ones in their mask, and labels as transformers has them."""
    tokens = torch.randint(0, LLAMA["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(length) < torch.arange(length - rows, length)[:, None] + 1).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def left_padded() -> Any:
    """Left-padded rows, with positions that count from the first visible token."""
    batch = {name: entry.flip(1) for name, entry in padded().items()}
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    # The token before the first visible one predicts nothing.
    return {**batch, "position_ids": positions, "labels": torch.where(positions == 0, -100, batch["labels"])}


def packed(rows: int = 4, length: int = 8) -> Any:
    """Rows of several documents, each of which counts its positions from 0."""
    tokens = padded(rows, length)["input_ids"]
    lengths = torch.tensor([[3, 5], [1, 7], [4, 4], [8, 0]])
    positions = torch.stack([torch.cat([torch.arange(int(n)) for n in row]) for row in lengths])
    return {"input_ids": tokens, "position_ids": positions, "labels": torch.where(positions == 0, -100, tokens)}


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        (LLAMA, padded()),
        (GPT2_UNTIED, left_padded()),
        ({**GEMMA2, "tie_word_embeddings": False}, packed()),
        (LLAMA, {**packed(), "attention_mask": torch.ones(4, 8, dtype=torch.long)}),
    ],
    ids=["right", "left", "packed", "masked"],
)
def test_padded_and_packed_rows_match_transformers_gradients(config: Any, batch: Any) -> None:
    pytest.importorskip("transformers")
    from tests.support.hf_reference import exactly, hf_model

    model = hf_model(config)
    with exactly():
        expected = model(**batch, use_cache=False).loss  # with a cache it looks for no documents
        expected.backward()

    reference = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plan = plan_of(db.schedules["zb-h1"](devices=2, micro_batches=4), config, strategy="full")
    loss, gradients = gradients_of(plan, batch, model=model)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert_gradients(gradients, reference)


def test_micro_batches_may_differ_in_rows_and_length() -> None:
    batches = [tokens_of(LLAMA, rows=2 - j % 2, length=5 + j, seed=j) for j in range(4)]
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)
    assert_same_gradients(plan, LLAMA, batches)


def test_micro_batches_may_differ_for_transformers_modules() -> None:
    pytest.importorskip("transformers")
    from tests.support.hf_reference import exactly, hf_model

    config = GENERIC["olmo2"]
    model, batches = hf_model(config), [tokens_of(config, rows=2 - j % 2, length=5 + j, seed=j) for j in range(4)]
    with exactly(), torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(b[:, :-1]).logits.flatten(0, 1), b[:, 1:].flatten(), reduction="sum"
            )
            for b in batches
        ]
    expected = float(sum(losses)) / sum(b[:, 1:].numel() for b in batches)
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), config)
    for loss in run_threads(plan, lambda pipeline: float(pipeline.step(batches)), model=model):
        assert loss == pytest.approx(expected, rel=1e-6)  # its own rotary tables are in fp32


def test_auxiliary_loss_with_padding_is_refused() -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), {**MIXTRAL, "output_router_logits": True})
    with pytest.raises(InputError, match="for this model: 'attention_mask' must be all ones"):
        run_threads(plan, lambda pipeline: pipeline.step(padded()))
