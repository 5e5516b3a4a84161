"""The operators of a transformer, with backwards that can leave the weight gradients for later.

A backward is split by the linear operators alone: they hold nearly all weight-gradient work, and nothing else
depends on it (the weight-gradient store of zero-bubble pipelines, Qi et al., ICLR 2024).  Norms and embeddings
compute their small weight gradients with the input gradients.  Matrices' and tables' gradients add up where they are
to be, without a tensor of the parameter's size per micro-batch.
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
"""Computes a weight gradient and adds it to its parameter's."""


class WeightGradStore:
    """The weight gradients that a split backward puts off until W; while closed, they are computed at once.

    Source: Qi et al., ICLR 2024; DualPipe's and Megatron's class of this name.
    """

    def __init__(self) -> None:
        self._deferring: tuple[Ledger | None, list[Deferred]] | None = None
        self.expected = True
        """True if the micro-batch whose forward runs now will leave its weight gradients here."""

    def collect_in(self, ledger: Ledger | None, queue: list[Deferred]) -> None:
        """Leave weight gradients in `queue` from now on, and count in `ledger`, if there is one, what they need."""
        self._deferring = ledger, queue

    def close(self) -> None:
        """Compute weight gradients at once from now on."""
        self._deferring = None

    def put(self, accumulate: Callable[[Tensor, Tensor], None], x: Tensor, gradient: Tensor) -> None:
        """Put off `accumulate(x, gradient)`, which adds to a parameter's gradient; or do it now, while closed."""
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
    """Apply an autograd function that has one result."""
    result: Tensor = function.apply(*arguments)
    return result


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate as autograd does: in micro-batch order, in the parameter's dtype."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def run_gradient_hooks(parameter: Tensor) -> None:
    """Run the hooks that autograd runs when it has added to a parameter's gradient."""
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def add_product(parameter: Tensor, a: Tensor, b: Tensor) -> None:
    """Accumulate the gradient a b where it is to be: no product is written and read again."""
    if a.dtype != parameter.dtype:  # autocast
        add_gradient(parameter, product(a, b).to(parameter.dtype))
    elif parameter.grad is None:
        parameter.grad = product(a, b)
    else:
        add_product_to(parameter.grad, a, b)


class Products:
    """The three products of a linear operator, in the dtype of their factors."""

    def factor(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight of a layer as it is multiplied in that dtype, which under autocast is not its own."""
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
        """Add this operator's part of the gradient of x [rows, in] to that of others, if there is one."""
        weight = self._factor(gy.dtype)
        return self.products.add_input_gradient(gx, gy, weight.t() if self.transposed else weight)

    def accumulate(self, x: Tensor, gy: Tensor) -> None:
        """Add the gradients to the parameters', not by autograd: see `add_product`."""
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
    """The results of linear operators on the same input, whose gradient is summed as it is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        multiplications: Sequence[Multiplication],
        weight_grads: WeightGradStore,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        # Only the weights' gradients need x: a frozen layer keeps nothing.
        ctx.save_for_backward(x if any(m.weight.requires_grad for m in multiplications) else None)
        # A parameter is no activation, and the deferred gradient belongs to the parameter itself.
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
    """The tensor as one that operators may change in place, also where a product in rows is viewed in three sizes."""
    return torch_internals.unsafe_view(y, y.shape) if y._is_view() else y


def deferrable_linear(
    x: Tensor, multiplications: Sequence[Multiplication], *, weight_grads: WeightGradStore
) -> tuple[Tensor, ...]:
    """Multiply the same input; the backward adds to the parameters' gradients itself, or later.

    Under `torch.autocast` it computes in that dtype, as torch's own does.
    """
    device = "cuda" if x.is_cuda else "cpu"  # the type's name by the device takes longer
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    # Autograd asks them whether they need a gradient.
    parameters = [p for m in multiplications for p in (m.weight, m.bias) if p is not None]
    apply: Callable[..., tuple[Tensor, ...]] = _Linear.apply
    return apply(x, multiplications, weight_grads, *parameters)


class _LookUp(Function):
    """Rows of a table."""

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
    """The tokens' rows of a table; the backward adds to these rows' gradients alone, and not to that of `padding`."""
    return call(_LookUp, tokens, table, padding)


class Deferring(torch.nn.Module):
    """A module with linear operators whose weight gradients can be deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_grads = WeightGradStore()


class Linear(Deferring):
    """A linear layer whose weight gradient can be deferred; parameters named and laid out as Hugging Face's."""

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
        """Add `scaling` B A x from now on, for A of [rank, inputs] and B of [outputs, rank]."""
        self.lora_A = Linear(self.inputs, rank, bias=False)
        self.lora_B = Linear(rank, self.outputs, bias=False)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs], with the adapter's part if the layer has one."""
        (y,) = deferrable_linear(x, [self.multiplication(self.bias)], weight_grads=self.weight_grads)
        if self.lora_A is None or self.lora_B is None:
            return y
        return torch.add(y, self.lora_B(self.lora_A(x)), alpha=self.scaling)

    def multiplication(self, bias: Tensor | None) -> Multiplication:
        """The layer without its adapter, with this bias."""
        return Multiplication(self.weight, bias, self.transposed, self.products)


class _RMSNorm(Function):
    """y = (w + offset) x / rms(x), the normalisation in fp32 at least; saves x and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.weight, ctx.offset, ctx.fused = weight, offset, _norms_in_one_kernel(x, weight, offset)
        if ctx.fused:
            y: Tensor
            y, scale = torch_internals.fused_rms_norm(x, weight.shape, weight, eps)
            ctx.save_for_backward(x, scale)
            return y
        wide = widen(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale)
        if offset:
            # Families with an offset round once, after the weight; the others before it too.
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


def _norms_in_one_kernel(x: Tensor, weight: Tensor, offset: float) -> bool:
    """Tell whether a kernel of torch's has the whole norm: on CUDA alone, where it saves most of the norm's traffic.

    It rounds once, after the weight.
    """
    return x.is_cuda and not offset and x.dtype == weight.dtype and x.dtype != torch.float64


def widen(x: Tensor) -> Tensor:
    """Convert bf16 and fp16 to fp32; other dtypes stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Normalise the last dimension, and multiply it by the weight to which `offset` is added."""
    return call(_RMSNorm, x, weight, eps, offset)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with a weight per feature, to which `offset` is added."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset
        self.function: Callable[..., Tensor] = rms_norm

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """`weight`: what stands for the parameter in the graph, if not itself."""
        return self.function(x, self.weight if weight is None else weight, self.eps, self.offset)


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


@cache
def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the function activation(gate) up; the same for the same activation function."""

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
"""Per activation function, its backward: of the result's gradient and x, the gradient of x."""


class GatedProduct(Function):
    """activation(gate) up, which keeps gate and up and computes the activation again for the backward."""

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
    """Compute cap tanh(x / cap), which is near x while x is small and never beyond the cap."""
    return torch.tanh(x / cap) * cap
