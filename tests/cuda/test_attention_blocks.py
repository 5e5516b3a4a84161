"""Blocks of ring attention on a GPU: the fused kernel's are those that are written out."""

from typing import Any

import pytest
import torch

from debubble.runtime.models.attention_blocks import (
    Attended,
    attend_to_block,
    attend_written_out,
    block_gradients,
    gradients_written_out,
)


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_kernels_blocks_are_those_of_scores_that_are_written_out(causal: bool, gpu: Any) -> None:
    random = torch.Generator(gpu).manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, 64, 4, 32, generator=random, device=gpu).bfloat16().transpose(1, 2) for _ in range(4)
    )
    options: Any = {"causal": causal, "scale": 0.2}
    fused, exact = attend_to_block(q, k, v, **options), attend_written_out(q.float(), k.float(), v.float(), **options)
    torch.testing.assert_close(fused.output.float(), exact.output, rtol=0.02, atol=0.02)
    torch.testing.assert_close(fused.log_sum, exact.log_sum, rtol=1e-3, atol=1e-3)
    # The second half of the queries alone, as a ring asks for them
    half = slice(32, 64)
    whole = Attended(exact.output[:, :, half], exact.log_sum[:, :, half])
    rounded = Attended(whole.output.bfloat16(), whole.log_sum)
    options["causal"] = False
    found = block_gradients(gradient[:, :, half], q[:, :, half], k, v, rounded, **options)
    expected = gradients_written_out(
        gradient[:, :, half].float(), q[:, :, half].float(), k.float(), v.float(), whole, **options
    )
    for mine, other in zip(found, expected, strict=True):
        assert (mine.float() - other).abs().max() <= 0.05 * other.abs().max()
