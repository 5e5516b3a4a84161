"""The operators of a transformer, with backwards that can leave the weight gradients for later.

A backward is split by the linear operators alone: they hold nearly all weight-gradient work, and nothing else
depends on it (the weight-gradient store of zero-bubble pipelines, Qi et al., ICLR 2024).  Norms and embeddings
compute their small weight gradients with the input gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd import Function

from debubble.ir import InputError
from debubble.runtime.memory import Kept, Ledger, value
from debubble.runtime.shape import Rope


@dataclass
class Deferred:
    """One weight gradient that is still to be computed."""

    accumulate: Callable[[Tensor, Tensor], None]
    x: Kept
    gradient: Kept

    def run(self) -> None:
        """Compute it and add it to the parameter's gradient."""
        self.accumulate(value(self.x), value(self.gradient))


class WeightGradients:
    """Where linear operators of one device leave their weight gradients; while closed, they compute them at once."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        """Whether any will ever be deferred; else torch's own linear operator does."""
        self._ledger: Ledger | None = None
        self._queue: list[Deferred] | None = None

    def defer(self, ledger: Ledger, queue: list[Deferred]) -> None:
        """From now on, leave weight gradients in `queue`, and count in `ledger` what they need."""
        self._ledger, self._queue = ledger, queue

    def close(self) -> None:
        self._ledger, self._queue = None, None

    @property
    def deferring(self) -> bool:
        return self._queue is not None

    def leave(self, accumulate: Callable[[Tensor, Tensor], None], x: Tensor, gradient: Tensor) -> None:
        assert self._ledger is not None
        assert self._queue is not None
        self._queue.append(Deferred(accumulate, self._ledger.save(x), self._ledger.save(gradient)))


def call(function: type[Function], *arguments: Any) -> Tensor:
    """Apply an autograd function that has one result."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate as autograd does: in micro-batch order, in the parameter's dtype."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Linear(Function):
    """y = x W^T + b for W of [out, in], or y = x W + b for W of [in, out] (`transposed`, GPT-2's Conv1D)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        # A parameter is no activation, and the deferred gradient belongs to the parameter itself.
        ctx.weight, ctx.bias, ctx.transposed, ctx.later = weight, bias, transposed, later
        return functional.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x,) = gradients, ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gx = gy.matmul(weight.t() if ctx.transposed else weight) if needs_x else None
        if ctx.later.deferring and needs_weight:

            def accumulate(x: Tensor, gy: Tensor) -> None:
                add_gradient(weight, _weight_gradient(x, gy, transposed))
                if needs_bias:
                    add_gradient(bias, _bias_gradient(gy))

            transposed = ctx.transposed
            ctx.later.leave(accumulate, x, gy)
            return gx, None, None, None, None
        gw = _weight_gradient(x, gy, ctx.transposed) if needs_weight else None
        return gx, gw, _bias_gradient(gy) if needs_bias else None, None, None


def _weight_gradient(x: Tensor, gy: Tensor, transposed: bool) -> Tensor:
    x, gy = x.flatten(0, -2), gy.flatten(0, -2)
    return x.t().mm(gy) if transposed else gy.t().mm(x)


def _bias_gradient(gy: Tensor) -> Tensor:
    return gy.flatten(0, -2).sum(0)


class Linear(torch.nn.Module):
    """A linear layer whose weight gradient can be deferred; parameters named and laid out as Hugging Face's."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, transposed: bool = False) -> None:
        super().__init__()
        size = (inputs, outputs) if transposed else (outputs, inputs)
        self.weight = torch.nn.Parameter(torch.empty(size))
        self.bias = torch.nn.Parameter(torch.empty(outputs)) if bias else None
        self.transposed = transposed
        self.later = WeightGradients()

    def forward(self, x: Tensor) -> Tensor:
        if not self.later.wanted:
            return functional.linear(x, self.weight.t() if self.transposed else self.weight, self.bias)
        return call(_Linear, x, self.weight, self.bias, self.transposed, self.later)


class _RMSNorm(Function):
    """y = w x / rms(x), the normalisation in fp32 at least; saves x and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, scale) = gradients, ctx.saved_tensors
        normal = _widen(x) * scale
        gw = (gy * normal.to(gy.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        g = _widen(gy * ctx.weight)
        gx = scale * (g - normal * (g * normal).mean(-1, keepdim=True))
        return gx.to(gy.dtype), gw, None


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with a weight per feature."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return call(_RMSNorm, x, self.weight, self.eps)


class _Rotate(Function):
    """Turns pairs of features by their position's angle: the same table turns the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.table = cosine, sine
        return _turn(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.table
        return _turn(gradients[0], cosine, -sine), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions to [batch, heads, length, head_dim], Hugging Face's (half-split) layout."""
    return call(_Rotate, x, cosine, sine)


def rotary_table(rope: Rope, head_dim: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [length, head_dim] each, with `like`'s dtype and device; angles are computed in fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device) / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(rope, frequency)
    angle = torch.arange(length, dtype=torch.float32, device=like.device)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _llama3(rope: Rope, frequency: Tensor) -> Tensor:
    """Llama 3's context extension: long wavelengths are stretched, short ones kept, those between interpolated."""
    turns = rope.original_length * frequency / (2 * math.pi)
    smooth = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, dropout: float = 0.0, seed: int = 0
) -> Tensor:
    """Causal attention over [batch, heads, length, head_dim]; k and v may have fewer heads.

    `dropout` on the attention weights takes its mask from `seed`, which no fused kernel can: it is written out.
    """
    length = q.shape[-2]
    mask = None
    if window is not None and window < length:
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance < window)
    if not dropout:
        grouped = k.shape[1] != q.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf"))
    return drop(scores.softmax(-1), dropout, seed) @ v


def drop(x: Tensor, p: float, seed: int) -> Tensor:
    """Dropout whose mask depends on `seed` alone, so that no order of operations changes it."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
    return torch.where(keep, x / (1 - p), 0)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function that a Hugging Face config names."""
    match name:
        case "silu" | "swish":
            return functional.silu
        case "gelu":
            return functional.gelu
        case "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast":
            return _gelu_tanh
        case "relu":
            return functional.relu
        case _:
            raise InputError(f"The runtime does not know the activation function '{name}'.")


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def token_loss(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Cross entropy summed over the micro-batch's tokens (target -100: ignored), times `scale`."""
    flat = logits.flatten(0, -2)
    return functional.cross_entropy(_widen(flat), targets.flatten(), reduction="sum") * scale
