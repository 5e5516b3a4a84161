"""What a batch says: tokens, labels as transformers means them, targets, and masks that change nothing."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.runtime.batch import read_batch
from tests.support.runtime_cases import LLAMA, MIXTRAL, plan_of, run_threads

TOKENS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
ONES = torch.ones(2, 4, dtype=torch.long)
ENDS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
"""The second row ends after two tokens."""


def read(batch: Any, **arguments: Any) -> Any:
    return read_batch(batch, micro_batches=2, device=torch.device("cpu"), **arguments)


def test_labels_are_the_tokens_themselves_and_targets_what_they_predict() -> None:
    by_labels = read({"input_ids": TOKENS, "labels": TOKENS})
    by_targets = read({"input_ids": TOKENS, "targets": TOKENS})
    assert by_labels.targets.tolist() == [[6, 7, 8, -100], [2, 3, 4, -100]]
    assert by_targets.targets.tolist() == TOKENS.tolist()


def test_the_checksum_is_that_of_tokens_and_targets_however_they_are_given() -> None:
    whole = read(TOKENS)
    assert read({"input_ids": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}).checksum == whole.checksum
    assert read({"input_ids": TOKENS[:, :-1], "targets": TOKENS[:, :-1]}).checksum != whole.checksum
    assert read(TOKENS.flip(0)).checksum != whole.checksum


@pytest.mark.parametrize("may_pad", [False, True])
def test_a_mask_of_ones_and_the_usual_positions_change_nothing(may_pad: bool) -> None:
    plain = read({"input_ids": TOKENS, "labels": TOKENS})
    more = {"attention_mask": ONES.bool(), "position_ids": torch.arange(4).expand(2, 4)}
    rows = read({"input_ids": TOKENS, "labels": TOKENS, **more}, may_pad=may_pad)
    assert torch.equal(rows.tokens, plain.tokens)
    assert torch.equal(rows.targets, plain.targets)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"attention_mask": ENDS}, "may only hide the end of rows, where the targets are -100"),
        ({"attention_mask": ENDS.flip(1), "labels": torch.where(ENDS.flip(1) == 1, TOKENS, -100)}, "the end of rows"),
        ({"attention_mask": ONES[:, None, None]}, r"'attention_mask' \[rows, length\]"),
        ({"position_ids": torch.arange(1, 5).expand(2, 4)}, "must be 0 to 3 in every row"),
        ({"position_ids": torch.arange(3)}, "must be 0 to 3 in every row"),
    ],
)
def test_what_would_change_the_loss_is_refused(entries: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read({"input_ids": TOKENS, "labels": TOKENS, **entries}, may_pad=True)


def test_a_model_of_which_nothing_is_known_takes_no_padding() -> None:
    labels = torch.where(ENDS == 1, TOKENS, -100)
    with pytest.raises(InputError, match="for this model 'attention_mask' must be all ones"):
        read({"input_ids": TOKENS, "labels": labels, "attention_mask": ENDS})


def padded(rows: int = 4, length: int = 8) -> Any:
    """Rows of different lengths with ones in their mask, and labels as transformers has them."""
    tokens = torch.randint(0, LLAMA["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(length) < torch.arange(length - rows, length)[:, None] + 1).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def test_padding_at_the_end_gives_the_loss_and_gradients_that_transformers_gives_with_its_mask() -> None:
    pytest.importorskip("transformers")
    from tests.support.hf_reference import exactly, hf_model

    model, batch = hf_model(LLAMA), padded()
    with exactly():
        expected = model(**batch).loss
        expected.backward()

    def one(pipeline: Any) -> Any:
        loss = pipeline.step(batch)
        return loss, {name: p.grad for name, p in pipeline.named_parameters()}

    reference = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)
    for loss, gradients in run_threads(plan, one, model=model):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            assert (gradient - reference[name]).abs().max() <= 1e-12 * reference[name].abs().max(), name


def test_routers_whose_loss_counts_pads_take_no_padding() -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), {**MIXTRAL, "output_router_logits": True})
    with pytest.raises(InputError, match="for this model 'attention_mask' must be all ones"):
        run_threads(plan, lambda pipeline: pipeline.step(padded()))
