"""The formats of quantised weights, as costs count them and the runtime has them.

Source: Dettmers et al., QLoRA, NeurIPS 2023, section 3: NormalFloat numbers of 4 bits, a scale for every block, and
double quantisation, which quantises the scales in their turn.
"""

import math

NF4, NF4_DQ = "nf4", "nf4-dq"
FORMATS = (NF4, NF4_DQ)
"""NormalFloat numbers with scales in fp32, and with scales of 8 bits."""

NF4_BLOCK = 64
"""Weights of a row that share a scale."""
SCALE_BLOCK = 256
"""Scales that share a scale of their own, in fp32, under double quantisation."""


def quantized_bytes(format: str, weights: float) -> float:
    """Bytes of a matrix of `weights` numbers, a multiple of NF4_BLOCK, in one of FORMATS.

    They are those of codes, of scales, and under double quantisation of their scales and their mean.
    """
    scales = weights / NF4_BLOCK
    if format == NF4:
        return weights / 2 + 4 * scales
    return weights / 2 + scales + 4 * math.ceil(scales / SCALE_BLOCK) + 4
