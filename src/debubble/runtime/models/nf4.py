"""Frozen weights in 4 bits beside adapters.

Source: Dettmers et al., QLoRA, NeurIPS 2023, section 3 and appendix E: NormalFloat numbers of 4 bits, with a scale, the
largest value, for every 64 weights.  Scales are kept in fp32 (no double quantisation).  Ranks that divide a weight
have whole blocks of it: the codes are those of the undivided one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from debubble.models.quantization import NF4_BLOCK
from debubble.runtime.distributed.cuts import Division, Divisions
from debubble.runtime.models.units import UnitModule
from debubble.runtime.operators import Linear, Products

NUMBERS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers that the codes 0 to 15 stand for: quantiles of a normal distribution, and an exact zero."""
SCALES = "weight_scales"
"""Name of a quantised layer's scales, beside its `weight`."""


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two in a byte, and the scales of a weight, by blocks of its rows one after another.

    Args:
        weight: Of any shape; the number of its elements is a multiple of 64.

    Returns:
        Codes [..., in / 2] in uint8, and scales [..., in / 64] in fp32, of a weight [..., in] whose rows are whole
        blocks; of others [blocks, 32] and [blocks, 1].
    """
    blocks = weight.detach().float().reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    numbers = torch.tensor(NUMBERS, device=weight.device)
    middles = (numbers[1:] + numbers[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=torch.finfo(torch.float32).tiny), middles).to(torch.uint8)
    pairs = codes[:, ::2] * 16 + codes[:, 1::2]
    if weight.shape[-1] % NF4_BLOCK:
        return pairs, scales
    return pairs.view(*weight.shape[:-1], -1), scales.view(*weight.shape[:-1], -1)


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """The weights that codes and scales stand for, in fp32: twice as many in the last dimension as codes."""
    numbers = torch.tensor(NUMBERS, device=codes.device)
    pairs = torch.cartesian_prod(numbers, numbers)  # of each byte
    weights = pairs.index_select(0, codes.flatten().int()).view(-1, NF4_BLOCK).mul_(scales.view(-1, 1))
    return weights.view(*codes.shape[:-1], -1)


class Nf4Products(Products):
    """The products of a frozen layer whose weight has 4 bits: it is expanded for each of them.

    Args:
        layer: The layer.
        shape: Of its weight.
    """

    def __init__(self, layer: Linear, shape: torch.Size) -> None:
        self._layer, self.shape = layer, shape

    def factor(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight that codes stand for, in the dtype of the product."""
        scales = getattr(self._layer, SCALES)
        return dequantized(weight, scales).view(self.shape).to(dtype)


def quantize(units: Iterable[UnitModule]) -> None:
    """Quantise the weights of the half-layers' linear layers: not the head's, routers', experts' or adapters'.

    A weight that is no whole number of blocks stays.
    """
    for unit in units:
        for layer in unit.linear_layers():
            weight = layer.weight
            if weight.numel() % NF4_BLOCK:
                continue
            codes, scales = quantized(weight)
            layer.weight = nn.Parameter(codes, requires_grad=False)
            layer.register_parameter(SCALES, nn.Parameter(scales, requires_grad=False))
            layer.products = Nf4Products(layer, weight.shape)


def packed(divisions: Divisions, weight: torch.Size, per: int) -> Divisions:
    """The divisions of a weight as those of its codes or scales, `per` weights of a row each."""
    last = len(weight) - 1
    return [Division(group, replace(cut, size=cut.size // per) if cut.dim == last else cut) for group, cut in divisions]


def scales_name(name: str) -> str:
    """The name of a quantised weight's scales."""
    return name.removesuffix("weight") + SCALES


def is_scales(name: str) -> bool:
    """Tell whether a parameter has the scales of a quantised weight."""
    return name.endswith(SCALES)


def shapes_of(units: Iterable[UnitModule]) -> dict[str, torch.Size]:
    """The shapes of the quantised weights of some units, by Hugging Face name."""
    return {
        unit.hf_name(f"{path}.weight"): module.products.shape
        for unit in units
        for path, module in unit.named_modules()
        if isinstance(module, Linear) and isinstance(module.products, Nf4Products)
    }
