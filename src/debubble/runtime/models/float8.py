"""8-bit products of linear layers, through torchao.

Source: Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433: inputs and weights in e4m3, gradients in
e5m2.  Every factor is scaled by its largest value, as torchao's `Float8Linear` does by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from debubble.ir import InputError
from debubble.plans import Plan
from debubble.runtime.models.units import UnitModule
from debubble.runtime.operators import Products, add_gradient

ALIGNMENT = 16
"""Sizes of 8-bit products must be multiples of this; other layers stay in the run's dtype."""
MIN_CAPABILITY = (8, 9)
"""Lowest compute capability with 8-bit products: Ada, then Hopper."""


class Float8Products(Products):
    """The three products of a linear layer in 8 bits.

    Args:
        emulated: Round factors to 8 bits and multiply them in the run's dtype: slow, but possible on any device.
    """

    def __init__(self, *, emulated: bool) -> None:
        from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

        self._roles = GemmInputRole
        self._products = LinearMMConfig(
            output=ScaledMMConfig(emulated, use_fast_accum=True),
            grad_input=ScaledMMConfig(emulated),
            grad_weight=ScaledMMConfig(emulated),
        )

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b, of x [..., in] and W [out, in]."""
        y = self._input(x.flatten(0, -2)).mm(self._weight(weight)).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def add_input_gradient(self, gx: Tensor | None, gy: Tensor, weight: Tensor) -> Tensor:
        """Add gy W to gx, if there is one; of gy [rows, out]."""
        product = self._gradient(gy).mm(self._weight(weight).t())
        return product if gx is None else gx.add_(product)

    def add_weight_gradient(self, parameter: Tensor, gy: Tensor, x: Tensor, *, transposed: bool) -> None:
        """Add gy^T x to the gradient of the parameter, or its transpose; of gy [rows, out] and x [rows, in]."""
        gradient = self._gradient(gy).t().mm(self._input(x)).to(parameter.dtype)
        add_gradient(parameter, gradient.t().contiguous() if transposed else gradient)

    def _input(self, x: Tensor) -> Tensor:
        return self._rounded(x, torch.float8_e4m3fn, self._roles.INPUT)

    def _weight(self, weight: Tensor) -> Tensor:
        """The weight, transposed."""
        return self._rounded(weight.t(), torch.float8_e4m3fn, self._roles.WEIGHT)

    def _gradient(self, gradient: Tensor) -> Tensor:
        return self._rounded(gradient, torch.float8_e5m2, self._roles.GRAD_OUTPUT)

    def _rounded(self, tensor: Tensor, dtype: torch.dtype, role: object) -> Tensor:
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

        rounded: Tensor = hp_tensor_to_float8_dynamic(tensor, dtype, self._products, gemm_input_role=role)
        return rounded


def float8_of(fp8: bool | Literal["emulated"], plan: Plan, on: torch.device) -> Float8Products | None:
    """The 8-bit products of a plan's linear layers; None without fp8.

    Raises InputError if the plan's units, this machine or the device do not support them.
    """
    if fp8 is False:
        return None
    if plan.model is None or plan.model.whole_layers:
        raise InputError(
            "fp8 is for units of debubble's own: convert modules of yours by torchao's convert_to_float8_training, and"
            " give them to Pipeline then, or train in bf16."
        )
    if plan.options.quantize:
        raise InputError("fp8 multiplies weights of the run's dtype: train in bf16 next to quantised ones.")
    if find_spec("torchao") is None:
        raise InputError("fp8 needs torchao: install the package torchao, or train in bf16.")
    if fp8 is True and not (on.type == "cuda" and torch.cuda.get_device_capability(on) >= MIN_CAPABILITY):
        raise InputError(f"fp8 needs a GPU that multiplies in 8 bits (Ada, Hopper or newer), not {on.type}: use bf16.")
    return Float8Products(emulated=fp8 == "emulated")


def multiply_in_float8(units: Iterable[UnitModule], products: Float8Products) -> None:
    """Make the linear layers of half-layers multiply in 8 bits, except head, routers, experts and adapters."""
    for unit in units:
        for layer in unit.linear_layers():
            if not any(size % ALIGNMENT for size in layer.weight.shape):
                layer.products = products
