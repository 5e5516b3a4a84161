"""Masked attention is computed block by block and matches attention with all scores masked."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from debubble.runtime.models.attention.core import attention
from debubble.runtime.operators import capped


class ScoresOfKernels(TorchDispatchMode):
    """Counts the scores per head that fused attention computes in forwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.count += args[0].shape[-2] * args[1].shape[-2]
        return func(*args, **(kwargs or {}))


def inputs(length: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, length, 8, generator=random, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )


@pytest.mark.parametrize(
    ("length", "packed", "cap"),
    [(6, False, None), (7, True, 2.0), (18, True, None), (23, False, 2.0), (23, True, None)],
)
def test_windowed_attention_matches_masked_scores(length: int, packed: bool, cap: float | None) -> None:
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
    actual = attention(q, k, v, window=6, documents=documents, cap=cap)
    expected = masked.transpose(1, 2).flatten(2)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for gradient, reference in zip(
        torch.autograd.grad(actual, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True
    ):
        torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-13)


def test_a_window_of_16_has_the_scores_of_31_keys_per_query() -> None:
    q, k, v = (tensor.detach() for tensor in inputs(128))
    with ScoresOfKernels() as scores:
        attention(q, k, v, window=16)
    assert scores.count == 16 * 16 + 7 * 16 * 31


MASKS: dict[str, Any] = {"window": 6, "documents": torch.arange(18).expand(2, -1) // 9, "cap": 2.0, "dropout": 0.5}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_scores_are_not_saved(mask: str) -> None:
    q, k, v = inputs(18)
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(saved.append, lambda tensor: tensor):
        y = attention(q, k, v, **{mask: MASKS[mask]})
    assert sum(tensor.numel() for tensor in saved) == 2 * q.numel() + k.numel() + v.numel() + q.numel() // 8
    assert y.data_ptr() in {tensor.data_ptr() for tensor in saved}


@pytest.mark.parametrize("mask", ["window", "documents"])
def test_masked_backward_does_not_recompute_attention(mask: str) -> None:
    y = attention(*inputs(18), **{mask: MASKS[mask]})
    with ScoresOfKernels() as scores:
        y.sum().backward()
    assert scores.count == 0


def test_masked_attention_uses_the_autocast_dtype() -> None:
    wide = [tensor.detach().float() for tensor in inputs(18)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = attention(*wide, window=6)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, attention(*(t.bfloat16() for t in wide), window=6), rtol=0, atol=0)
