"""Frozen weights in 4 bits, for training adapters.

Source: Dettmers et al., QLoRA, NeurIPS 2023, section 3 and appendix E: 4-bit NormalFloat codes with one scale, the
largest absolute value, per 64 weights.  Shards of a weight consist of complete blocks, so their codes are those of the
full weight.  torchao's `NF4Tensor` is not used, as it always quantises scales and hides the storages to shard.

Scales are in fp32, or quantised too (double quantisation, section 3): their mean is subtracted, and each gets an 8-bit
code of the dynamic data type (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022, section 2.2)
relative to the largest of 256.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from debubble.models.quantization import NF4_BLOCK, NF4_DQ, SCALE_BLOCK
from debubble.runtime.distributed.cuts import Division, Divisions
from debubble.runtime.models.units import UnitModule
from debubble.runtime.operators import Linear, Products

NUMBERS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of the codes 0 to 15: quantiles of a normal distribution, and an exact zero."""
SCALES = ("weight_scales", "weight_scale_maxima", "weight_scale_mean")
"""Names of a quantised layer's scales, and of the maxima and mean that quantised scales need."""


@cache
def dynamic_numbers() -> tuple[float, ...]:
    """The values of the 256 codes of scales, ascending: from about -1 to 1, denser near zero, which is exact.

    Every decade from 1e-6 to 1 has twice as many as the one below, at the centers of equal intervals.
    """
    decades = ((10.0 ** (e - 6), 2**e) for e in range(7))
    positive = [decade * (0.1 + 0.9 * (i + 0.5) / parts) for decade, parts in decades for i in range(parts)]
    return (*(-x for x in reversed(positive)), 0.0, *positive, 1.0)


def quantized(weight: Tensor, *, double: bool = False) -> tuple[Tensor, ...]:
    """Quantise a weight: its codes, two per byte, and scales, by blocks in row-major order.

    Args:
        weight: A weight of any shape, whose number of elements is a multiple of 64.
        double: Whether to quantise the scales, too.

    Returns:
        Codes [..., in / 2] in uint8, and scales [..., in / 64] in fp32, if rows of the weight [..., in] consist of
        complete blocks; else [blocks, 32] and [blocks, 1].  With double quantisation, scales are codes in uint8,
        followed by two fp32 tensors: the largest distance from the mean per 256 scales, and the mean [1].
    """
    codes, scales = _weight_codes(weight)
    if not double:
        return codes, scales
    mean = scales.double().mean().float().view(1)  # in fp64, as the order of a sum may differ
    return codes, *_scale_codes(scales, mean), mean


def _weight_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.detach().float().reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    codes = _nearest(NUMBERS, blocks, scales)
    pairs = codes[:, ::2] * 16 + codes[:, 1::2]
    if weight.shape[-1] % NF4_BLOCK:
        return pairs, scales
    return pairs.view(*weight.shape[:-1], -1), scales.view(*weight.shape[:-1], -1)


def _scale_codes(scales: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of scales, and the largest distance from the mean per 256 scales."""
    distances = (scales - mean).flatten()
    blocks = distances.split(SCALE_BLOCK)  # the last one may be smaller
    maxima = torch.stack([block.abs().amax() for block in blocks])
    codes = _nearest(dynamic_numbers(), distances, _repeat_maxima(maxima, len(distances)))
    return codes.view(scales.shape), maxima


def _nearest(numbers: Sequence[float], x: Tensor, scales: Tensor) -> Tensor:
    """Codes of the nearest numbers to x / scales."""
    known = torch.tensor(numbers, device=x.device)
    middles = (known[1:] + known[:-1]) / 2
    return torch.bucketize(x / scales.clamp(min=torch.finfo(torch.float32).tiny), middles).to(torch.uint8)


def _repeat_maxima(maxima: Tensor, scales: int) -> Tensor:
    return maxima.repeat_interleave(SCALE_BLOCK)[:scales]


def _expanded_scales(codes: Tensor, maxima: Tensor, mean: Tensor) -> Tensor:
    """Dequantise scales, to fp32."""
    numbers = torch.tensor(dynamic_numbers(), device=codes.device)
    distances = numbers.index_select(0, codes.flatten().int())
    return distances.mul_(_repeat_maxima(maxima, codes.numel())).add_(mean)


def dequantized(codes: Tensor, *scales: Tensor) -> Tensor:
    """Dequantise weights, to fp32: twice as many in the last dimension as codes."""
    factors = _expanded_scales(*scales) if len(scales) > 1 else scales[0]
    numbers = torch.tensor(NUMBERS, device=codes.device)
    pairs = torch.cartesian_prod(numbers, numbers)  # of each byte
    weights = pairs.index_select(0, codes.flatten().int()).view(-1, NF4_BLOCK).mul_(factors.view(-1, 1))
    return weights.view(*codes.shape[:-1], -1)


class Nf4Products(Products):
    """The products of a frozen layer with a 4-bit weight of that shape, which is dequantised for each product."""

    def __init__(self, layer: Linear, shape: torch.Size) -> None:
        self._layer, self.shape = layer, shape

    def factor(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The dequantised weight, in the dtype of the product."""
        scales = (getattr(self._layer, name) for name in SCALES if hasattr(self._layer, name))
        return dequantized(weight, *scales).view(self.shape).to(dtype)


def quantize(units: Iterable[UnitModule], format: str) -> None:
    """Quantise the weights of linear layers of half-layers, except head, routers, experts and adapters.

    Weights whose size is no multiple of the block size are not quantised.
    """
    for unit in units:
        for layer in unit.linear_layers():
            weight = layer.weight
            if weight.numel() % NF4_BLOCK:
                continue
            codes, *scales = quantized(weight, double=format == NF4_DQ)
            layer.weight = nn.Parameter(codes, requires_grad=False)
            for name, tensor in zip(SCALES, scales, strict=False):
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            layer.products = Nf4Products(layer, weight.shape)


def packed(divisions: Divisions, weight: torch.Size, per: int) -> Divisions:
    """The divisions of a weight's codes or scales, each of which stands for `per` weights of a row."""
    last = len(weight) - 1
    return [Division(group, replace(cut, size=cut.size // per) if cut.dim == last else cut) for group, cut in divisions]


def scales_names(name: str, parameters: Container[str]) -> list[str]:
    """Names of a quantised weight's scales, and of the maxima and mean of quantised scales."""
    names = (name.removesuffix("weight") + suffix for suffix in SCALES)
    return [scales for scales in names if scales in parameters]


def is_scales(name: str) -> bool:
    """Tell whether a parameter has the scales of a quantised weight, or their maxima or mean."""
    return name.endswith(SCALES)


def shapes_of(units: Iterable[UnitModule]) -> dict[str, torch.Size]:
    """Unquantised shapes of the quantised weights of some units, by Hugging Face name."""
    return {
        unit.hf_name(f"{path}.weight"): module.products.shape
        for unit in units
        for path, module in unit.named_modules()
        if isinstance(module, Linear) and isinstance(module.products, Nf4Products)
    }
