"""Blocks of attention on a GPU: the fused kernels match written-out scores."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from debubble.runtime.models.attention.blocks import (
    Attended,
    Scores,
    attend_to_block,
    attend_unfused,
    block_gradients,
    gradients_unfused,
)


@pytest.mark.cuda
@pytest.mark.parametrize("block", ["whole", "causal", "window", "documents"])
def test_the_fused_kernels_blocks_are_those_of_written_scores(block: str, gpu: Any) -> None:
    random = torch.Generator(gpu).manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, 60, 4, 32, generator=random, device=gpu).bfloat16().transpose(1, 2) for _ in range(4)
    )
    place = torch.arange(60, device=gpu)
    distance = place[:, None] - place
    window = (distance >= 0) & (distance < 16)
    documents = (window & (place[:, None] // 20 == place // 20)).expand(2, 1, -1, -1)
    seen = {"window": window, "documents": documents}.get(block)
    scores = Scores(scale=0.2, causal=block == "causal", seen=seen)
    fused, exact = attend_to_block(q, k, v, scores), attend_unfused(q.float(), k.float(), v.float(), scores)
    torch.testing.assert_close(fused.output.float(), exact.output, rtol=0.02, atol=0.02)
    torch.testing.assert_close(fused.log_sum, exact.log_sum, rtol=1e-3, atol=1e-3)
    # A subset of the queries, as needed by rings and windows
    rows = slice(30, 60)
    attended = Attended(exact.output[:, :, rows], exact.log_sum[:, :, rows])
    rounded = Attended(attended.output.bfloat16(), attended.log_sum)
    row_scores = replace(scores, causal=False, seen=None if seen is None else seen[..., rows, :])
    actual = block_gradients(gradient[:, :, rows], q[:, :, rows], k, v, rounded, row_scores)
    expected = gradients_unfused(
        gradient[:, :, rows].float(), q[:, :, rows].float(), k.float(), v.float(), attended, row_scores
    )
    for mine, other in zip(actual, expected, strict=True):
        assert (mine.float() - other).abs().max() <= 0.05 * other.abs().max()
