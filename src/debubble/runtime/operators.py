"""The operators of a transformer, with backwards that can defer weight gradients.

Only linear operators split their backward: they have nearly all weight-gradient work (the weight-gradient store of
zero-bubble pipelines, Qi et al., ICLR 2024).  Norms and embeddings compute their small weight gradients with the input
gradients.  Gradients of matrices and tables are accumulated in place, without a tensor of the parameter's size per
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd import Function

from debubble.ir import InputError
from debubble.runtime import torch_internals
from debubble.runtime.matrix_products import add_product_to, linear, product
from debubble.runtime.memory.activations import Ledger, unpack

Deferred = Callable[[], None]
"""Computes a weight gradient and adds it to that of the parameter."""


class WeightGradStore:
    """Weight gradients that a split backward defers to W; while the store is closed, they are computed at once.

    Source: Qi et al., ICLR 2024; named as DualPipe's class.
    """

    def __init__(self) -> None:
        self._deferring: tuple[Ledger | None, list[Deferred]] | None = None
        self.expected = True
        """True if the backward of the current forward's micro-batch will be split."""

    def collect_in(self, ledger: Ledger | None, queue: list[Deferred]) -> None:
        """Defer weight gradients to `queue` from now on; the ledger, if any, counts their saved tensors."""
        self._deferring = ledger, queue

    def close(self) -> None:
        """Compute weight gradients at once from now on."""
        self._deferring = None

    def put(self, accumulate: Callable[[Tensor, Tensor], None], x: Tensor, gradient: Tensor) -> None:
        """Defer `accumulate(x, gradient)`, which adds to a parameter's gradient; call it now while closed."""
        if self._deferring is None:
            accumulate(x, gradient)
        else:
            ledger, queue = self._deferring
            if ledger is None:
                queue.append(partial(accumulate, x.detach(), gradient.detach()))
                return
            saved_x, saved_gradient = ledger.save(x), ledger.save(gradient)
            queue.append(lambda: accumulate(unpack(saved_x), unpack(saved_gradient)))


def call(function: type[Function], *arguments: Any) -> Tensor:
    """Apply an autograd function with one result."""
    result: Tensor = function.apply(*arguments)
    return result


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate as autograd does: in micro-batch order, in the parameter's dtype."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def run_gradient_hooks(parameter: Tensor) -> None:
    """Run a parameter's post-accumulate-grad hooks, as autograd would."""
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def add_product(parameter: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the gradient a b to the parameter's in place, without a temporary product."""
    if a.dtype != parameter.dtype:  # autocast
        add_gradient(parameter, product(a, b).to(parameter.dtype))
    elif parameter.grad is None:
        parameter.grad = product(a, b)
    else:
        add_product_to(parameter.grad, a, b)


class Products:
    """The three products of a linear operator, in the dtype of their factors."""

    def factor(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight as a factor in `dtype`, which differs from its own under autocast."""
        return weight if weight.dtype == dtype else weight.to(dtype)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b, of x [..., in] and W [out, in]."""
        return linear(x, weight, bias)

    def add_input_gradient(self, gx: Tensor | None, gy: Tensor, weight: Tensor) -> Tensor:
        """Add gy W to gx, if there is one; of gy [rows, out]."""
        return product(gy, weight) if gx is None else add_product_to(gx, gy, weight)

    def add_weight_gradient(self, parameter: Tensor, gy: Tensor, x: Tensor, *, transposed: bool) -> None:
        """Add gy^T x to the gradient of the parameter, or its transpose; of gy [rows, out] and x [rows, in]."""
        if transposed:
            add_product(parameter, x.t(), gy)
        else:
            add_product(parameter, gy.t(), x)


PLAIN = Products()


class Multiplication(NamedTuple):
    """y = x W^T + b for W of [out, in], or y = x W + b for W of [in, out] (`transposed`, GPT-2's Conv1D)."""

    weight: Tensor
    bias: Tensor | None = None
    transposed: bool = False
    products: Products = PLAIN

    def output(self, x: Tensor) -> Tensor:
        """Compute y."""
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:  # autocast
            bias = bias.to(x.dtype)
        weight = self._factor(x.dtype)
        return self.products.output(x, weight.t() if self.transposed else weight, bias)

    def add_input_gradient(self, gx: Tensor | None, gy: Tensor) -> Tensor:
        """Add this operator's gradient of x [rows, in] to gx, if there is one."""
        weight = self._factor(gy.dtype)
        return self.products.add_input_gradient(gx, gy, weight.t() if self.transposed else weight)

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add the gradients to the parameters' without autograd: see `add_product`."""
        self.products.add_weight_gradient(self.weight, gy, x, transposed=self.transposed)
        run_gradient_hooks(self.weight)
        self.accumulate_bias(gy)

    def accumulate_bias(self, gy: Tensor) -> None:
        """Add the bias's gradient, if it has one."""
        if self.bias is not None and self.bias.requires_grad:
            add_gradient(self.bias, gy.sum(0).to(self.bias.dtype))
            run_gradient_hooks(self.bias)

    def _factor(self, dtype: torch.dtype) -> Tensor:
        return self.products.factor(self.weight, dtype)


class _Linear(Function):
    """Linear operators on the same input, whose gradients are accumulated in one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        multiplications: Sequence[Multiplication],
        weight_grads: WeightGradStore,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        # Only weight gradients need x: a frozen layer saves nothing.
        ctx.save_for_backward(x if any(m.weight.requires_grad for m in multiplications) else None)
        # Not saved: parameters are no activations, and deferred gradients are added to the parameters themselves.
        ctx.multiplications, ctx.weight_grads = multiplications, weight_grads
        return tuple(_no_view(m.output(x)) for m in multiplications)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gx, rows = None, [gy.flatten(0, -2) for gy in gradients]
        if ctx.needs_input_grad[0]:
            for multiplication, gy in zip(ctx.multiplications, rows, strict=True):
                gx = multiplication.add_input_gradient(gx, gy)
        for multiplication, gy in zip(ctx.multiplications, rows, strict=True):
            if multiplication.weight.requires_grad:
                ctx.weight_grads.put(multiplication.accumulate, x.flatten(0, -2), gy)
            else:
                multiplication.accumulate_bias(gy)
        of_x = None if gx is None else gx.view(*gradients[0].shape[:-1], -1)
        return of_x, *[None] * (len(ctx.needs_input_grad) - 1)


def _no_view(y: Tensor) -> Tensor:
    """The tensor in a form that may be changed in place, even if it is a reshaped product."""
    return torch_internals.unsafe_view(y, y.shape) if y._is_view() else y


def deferrable_linear(
    x: Tensor, multiplications: Sequence[Multiplication], *, weight_grads: WeightGradStore
) -> tuple[Tensor, ...]:
    """Apply linear operators to the same input; the backward accumulates their weight gradients, or defers that.

    Under `torch.autocast` it computes in that dtype, as torch's linear does.
    """
    device = "cuda" if x.is_cuda else "cpu"  # faster than x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    # As arguments, they let autograd find out whether the result needs a gradient.
    parameters = [p for m in multiplications for p in (m.weight, m.bias) if p is not None]
    apply: Callable[..., tuple[Tensor, ...]] = _Linear.apply
    return apply(x, multiplications, weight_grads, *parameters)


class _LookUp(Function):
    """Embedding lookup."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens if table.requires_grad else None)
        ctx.table, ctx.padding = table, padding
        return functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (gy,), (tokens,) = gradients, ctx.saved_tensors
        if ctx.padding is not None:
            gy = gy * (tokens != ctx.padding).unsqueeze(-1)
        if ctx.table.grad is None:
            ctx.table.grad = torch.zeros_like(ctx.table)
        ctx.table.grad.index_put_((tokens,), gy, accumulate=True)
        run_gradient_hooks(ctx.table)
        return None, None, None


def look_up(tokens: Tensor, table: Tensor, *, padding: int | None = None) -> Tensor:
    """Rows of a table; the backward adds to the gradients of these rows only, and not to that of `padding`."""
    return call(_LookUp, tokens, table, padding)


class Deferring(torch.nn.Module):
    """A module with linear operators whose weight gradients can be deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_grads = WeightGradStore()


class Linear(Deferring):
    """A linear layer whose weight gradient can be deferred, with Hugging Face's parameter names and layouts."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, transposed: bool = False) -> None:
        super().__init__()
        size = (inputs, outputs) if transposed else (outputs, inputs)
        self.weight = torch.nn.Parameter(torch.empty(size))
        self.bias = torch.nn.Parameter(torch.empty(outputs)) if bias else None
        self.transposed = transposed
        self.inputs, self.outputs = inputs, outputs
        self.products = PLAIN
        self.lora_A: Linear | None = None
        self.lora_B: Linear | None = None
        self.scaling = 0.0

    def adapt(self, rank: int, scaling: float) -> None:
        """Add a LoRA adapter: `scaling` B A x, for A of [rank, inputs] and B of [outputs, rank]."""
        self.lora_A = Linear(self.inputs, rank, bias=False)
        self.lora_B = Linear(rank, self.outputs, bias=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs], including the adapter if the layer has one."""
        (y,) = deferrable_linear(x, [self.multiplication(self.bias)], weight_grads=self.weight_grads)
        if self.lora_A is None or self.lora_B is None:
            return y
        return torch.add(y, self.lora_B(self.lora_A(x)), alpha=self.scaling)

    def multiplication(self, bias: Tensor | None) -> Multiplication:
        """The layer without its adapter, with this bias."""
        return Multiplication(self.weight, bias, self.transposed, self.products)


class _RMSNorm(Function):
    """y = (w + offset) x / rms(x), normalised in at least fp32; saves x and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.weight, ctx.offset, ctx.fused = weight, offset, _use_fused_norm(x, weight, offset)
        if ctx.fused:
            y: Tensor
            y, scale = torch_internals.fused_rms_norm(x, weight.shape, weight, eps)
            ctx.save_for_backward(x, scale)
            return y
        wide = widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        if offset:
            # Families with an offset round once, after the weight; others also before it.
            return ((offset + widen(weight)) * (wide * scale)).to(x.dtype)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, scale) = gradients, ctx.saved_tensors
        if ctx.fused:
            needed = [True, ctx.needs_input_grad[1]]
            gx, gw = torch_internals.fused_rms_norm_backward(gy, x, ctx.weight.shape, scale, ctx.weight, needed)
            return gx, gw, None, None
        normal = widen(x) * scale
        gw = (gy * normal.to(gy.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        g = widen(gy * (ctx.weight + ctx.offset if ctx.offset else ctx.weight))
        mean = (g * normal).mean(-1, keepdim=True)
        gx = g.sub_(normal.mul_(mean)).mul_(scale)
        return gx.to(gy.dtype), gw, None, None


def _use_fused_norm(x: Tensor, weight: Tensor, offset: float) -> bool:
    """Tell whether to use torch's fused kernel: on CUDA, where it saves most memory traffic; it rounds once."""
    return x.is_cuda and not offset and x.dtype == weight.dtype and x.dtype != torch.float64


def widen(x: Tensor) -> Tensor:
    """Convert bf16 and fp16 to fp32; keep other dtypes."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Normalise the last dimension, and multiply it by weight + offset."""
    return call(_RMSNorm, x, weight, eps, offset)


class RMSNorm(torch.nn.Module):
    """RMS norm with a weight per feature, to which `offset` is added."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset
        self.function: Callable[..., Tensor] = rms_norm

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Normalise x; `weight` replaces the parameter, if it is given."""
        return self.function(x, self.weight if weight is None else weight, self.eps, self.offset)


def drop(x: Tensor, p: float, seed: int) -> Tensor:
    """Dropout whose mask depends on `seed` only, whatever the order of operations."""
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


@cache
def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the function activation(gate) up, once per activation function, so that `torch.compile` can cache it."""

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    return product


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_DERIVATIVES: Mapping[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    functional.silu: torch.ops.aten.silu_backward,
    functional.gelu: torch.ops.aten.gelu_backward,
    _gelu_tanh: partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    functional.relu: partial(torch.ops.aten.threshold_backward, threshold=0),
}
"""Activation function -> its backward, which maps the result's gradient and x to the gradient of x."""


class GatedProduct(Function):
    """activation(gate) up, which saves gate and up and recomputes the activation in the backward."""

    @staticmethod
    def forward(ctx: Any, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        """Compute the product."""
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return activation(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        """Compute the gradients of gate and up."""
        gate, up = ctx.saved_tensors
        (gy,) = gradients
        return None, _DERIVATIVES[ctx.activation](gy * up, gate), ctx.activation(gate).mul_(gy)


def capped(x: Tensor, cap: float) -> Tensor:
    """Soft-cap: compute cap tanh(x / cap)."""
    return torch.tanh(x / cap) * cap
