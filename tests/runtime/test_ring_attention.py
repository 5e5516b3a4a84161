"""Ring attention matches attention over full sequences and over gathered keys and values."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.distributed.thread_transport import ThreadTransport
from debubble.runtime.models.attention.blocks import (
    Attended,
    Scores,
    attend_to_block,
    attend_unfused,
    block_gradients,
    gradients_unfused,
)
from debubble.runtime.models.attention.core import attention

LENGTH, HEADS, SIZE = 24, 4, 8


def whole_sequences(*, kv_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the result's gradient, [batch, heads, length, size]."""
    random = torch.Generator().manual_seed(0)
    shapes = [(2, LENGTH, heads, SIZE) for heads in (HEADS, kv_heads, kv_heads)] + [(2, LENGTH, HEADS * SIZE)]
    made = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]
    return [t.transpose(1, 2) if t.dim() == 4 else t for t in made]


def by_ranks(size: int, sequences: Sequence[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """Full result of ranks that shard a sequence, and the gradients of queries, keys and values."""

    def one(transport: ThreadTransport) -> list[Tensor]:
        context = ContextGroup(transport, tuple(range(size)))
        *inputs, gradient = (context.local_chunks(t, -2) for t in sequences)
        inputs = [t.detach().requires_grad_() for t in inputs]
        y = attend(*inputs, context=context)
        shards = [y.detach(), *torch.autograd.grad(y, inputs, gradient)]
        return [context.gather(t, -2) for t in shards]

    answer: list[Tensor] = ThreadTransport.run(size, one)[0]
    return answer


def by_one(sequences: Sequence[Tensor]) -> list[Tensor]:
    q, k, v = (t.detach().requires_grad_() for t in sequences[:3])
    y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), sequences[3])]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], within: float) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert (mine - other).abs().max() <= within * other.abs().max()


@pytest.mark.parametrize(("size", "kv_heads"), [(2, HEADS), (3, 1), (4, 2)])
def test_ring_attention_matches_one_rank(size: int, kv_heads: int) -> None:
    sequences = whole_sequences(kv_heads=kv_heads)
    assert_equal(by_ranks(size, sequences, attention), by_one(sequences), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ring_rounds_in_its_dtype(dtype: torch.dtype) -> None:
    exact, rounded = (by_ranks(3, whole_sequences(dtype=d), attention) for d in (torch.float64, dtype))
    assert {t.dtype for t in rounded} == {dtype}
    assert_equal(rounded, exact, 4 * torch.finfo(dtype).eps)


class RingAlone(ThreadTransport):
    """Ranks that count what they pass on and cannot gather."""

    passed = 0

    def rotate(self, tensor: Tensor, ranks: tuple[int, ...]) -> Callable[[], Tensor]:
        self.passed += tensor.numel()
        return super().rotate(tensor, ranks)

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        raise AssertionError("gathered")


@pytest.mark.parametrize("size", [2, 4])
def test_keys_circulate_once_and_again_with_gradients(size: int) -> None:
    sequences = whole_sequences(kv_heads=2)

    def one(transport: ThreadTransport) -> tuple[int, int]:
        ring = RingAlone(transport._hub, transport.rank)
        context = ContextGroup(ring, tuple(range(size)))
        *inputs, gradient = (context.local_chunks(t, -2) for t in sequences)
        inputs = [t.detach().requires_grad_() for t in inputs]
        y = attention(*inputs, context=context)
        forward = ring.passed
        y.backward(gradient)
        return forward, ring.passed - forward

    share = 2 * sequences[1].numel() // size
    assert ThreadTransport.run(size, one) == [((size - 1) * share, 2 * (size - 1) * share)] * size


def test_ring_saves_inputs_result_and_one_number_per_query() -> None:
    sequences = whole_sequences()

    def one(transport: ThreadTransport) -> int:
        context, saved = ContextGroup(transport, (0, 1)), list[Tensor]()

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        inputs = [context.local_chunks(t, -2).detach().requires_grad_() for t in sequences[:3]]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            attention(*inputs, context=context)
        return sum(t.numel() for t in saved)

    of_one = 2 * HEADS * LENGTH // 2
    assert ThreadTransport.run(2, one) == [4 * SIZE * of_one + of_one] * 2


def test_ring_uses_the_autocast_dtype() -> None:
    def attend(*inputs: Tensor, context: ContextGroup) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(*inputs, context=context).float()

    actual = by_ranks(2, whole_sequences(dtype=torch.float32), attend)
    expected = by_ranks(2, whole_sequences(dtype=torch.bfloat16), attention)
    torch.testing.assert_close(actual[0], expected[0].float(), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_unfused_score_gradients_match_the_fused_kernel(causal: bool) -> None:
    q, k, v = whole_sequences()[:3]
    scores = Scores(scale=0.3, causal=causal)
    fused, written = attend_to_block(q, k, v, scores), attend_unfused(q, k, v, scores)
    assert_equal([written.output, written.log_sum], [fused.output, fused.log_sum], 1e-14)
    # Gradients of one block, where other keys have half of the attention weight
    attended = Attended(0.5 * fused.output, fused.log_sum + math.log(2))
    gradient = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    actual = gradients_unfused(gradient, q, k, v, attended, scores)
    assert_equal(actual, block_gradients(gradient, q, k, v, attended, scores), 1e-14)
