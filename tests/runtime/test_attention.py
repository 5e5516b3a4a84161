"""Attention within a window is computed block by block, and is what masking all scores gives."""

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode

from debubble.runtime.models.attention import attention
from debubble.runtime.operators import capped


class Scores(TorchFunctionMode):
    """Counts the scores per head that fused attention computes, masked or not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.count += args[0].shape[-2] * args[1].shape[-2]
        return func(*args, **(kwargs or {}))


def inputs(length: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, length, 8, generator=random, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [6, 7, 18, 23])
def test_attention_within_a_window_is_that_of_masked_scores(length: int, packed: bool, cap: float | None) -> None:
    q, k, v = inputs(length)
    place = torch.arange(length)
    documents = (place // 9).expand(2, -1) if packed else None
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < 6)
    if documents is not None:
        seen = (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]
    scores = q @ k.repeat_interleave(2, 1).transpose(-2, -1) / 8**0.5
    scores = scores if cap is None else capped(scores, cap)
    masked = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    found = attention(q, k, v, window=6, documents=documents, cap=cap)
    expected = masked.transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for gradient, reference in zip(
        torch.autograd.grad(found, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True
    ):
        torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-13)


def test_a_window_of_16_has_the_scores_of_31_keys_per_query_and_not_of_all() -> None:
    q, k, v = (tensor.detach() for tensor in inputs(128))
    with Scores() as scores:
        attention(q, k, v, window=16)
    assert scores.count == 16 * 16 + 7 * 16 * 31
