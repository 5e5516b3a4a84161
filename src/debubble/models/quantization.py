"""The formats of quantized weights, for costs and the runtime.

Source: Dettmers et al., QLoRA, NeurIPS 2023, section 3: 4-bit NormalFloat numbers with a scale per block, and double
quantization, which quantizes the scales.
"""

import math

NF4, NF4_DQ = "nf4", "nf4-dq"
FORMATS = (NF4, NF4_DQ)
"""NormalFloat numbers with fp32 scales, and with 8-bit scales."""

NF4_BLOCK = 64
"""Weights of a row per scale."""
SCALE_BLOCK = 256
"""Scales per fp32 scale of scales with double quantization."""


def quantized_bytes(format: str, weights: float) -> float:
    """Bytes of a matrix of `weights` numbers, a multiple of NF4_BLOCK, in one of FORMATS.

    They include codes and scales, and with double quantization the scales' scales and mean.
    """
    scales = weights / NF4_BLOCK
    if format == NF4:
        return weights / 2 + 4 * scales
    return weights / 2 + scales + 4 * math.ceil(scales / SCALE_BLOCK) + 4
