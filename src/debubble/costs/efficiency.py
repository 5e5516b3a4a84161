"""What of the peak rates real kernels reach, by type of device.

How much of the compute peak a matrix product reaches depends on its smallest side, and for an attention core on how
many query rows there are to share out, so both are tables.  One scalar for all shapes is off by 18% on average on
published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

Table = tuple[tuple[float, float], ...]
"""(size, share of the peak), sizes ascending; interpolated in the logarithm of the size."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peak rates."""

    matmul: Table
    """By the smallest side of the product."""
    attention: Table
    """Forward of a fused attention core, by query rows (sequences x tokens x heads)."""
    attention_backward: Table
    memory: float = 0.8
    link: float = 0.7
    network: float = 0.7
    host: float = 0.75
    launch: float = 15e-6
    """Seconds that every operator takes on top of its work."""


# Micro-benchmarks published with SimuMax for A100 (PCIe) and B200, averaged over the layouts of forward and backward.
# Products on the SXM A100 are taken 10% faster (fits Korthikanti et al.'s layer times), on B200 7% slower (clocks under
# sustained load); Hopper's tables are fitted to Megatron-Kwai's H800 runs.
AMPERE = Efficiency(
    matmul=((128, 0.22), (256, 0.42), (512, 0.64), (1024, 0.70), (2048, 0.77), (4096, 0.80)),
    attention=((16384, 0.26), (32768, 0.39), (65536, 0.48), (131072, 0.54), (262144, 0.56)),
    attention_backward=((16384, 0.34), (32768, 0.38), (65536, 0.42), (131072, 0.45), (262144, 0.47)),
)
HOPPER = Efficiency(
    matmul=((128, 0.17), (256, 0.31), (512, 0.46), (1024, 0.56), (2048, 0.60), (4096, 0.62)),
    attention=((16384, 0.18), (32768, 0.28), (65536, 0.36), (131072, 0.40), (262144, 0.42)),
    attention_backward=((16384, 0.20), (32768, 0.25), (65536, 0.30), (131072, 0.32), (262144, 0.34)),
)
BLACKWELL = Efficiency(
    matmul=((128, 0.17), (256, 0.23), (512, 0.41), (1024, 0.48), (2048, 0.46), (4096, 0.45)),
    attention=((16384, 0.08), (32768, 0.16), (65536, 0.29), (131072, 0.37), (262144, 0.43), (524288, 0.48)),
    attention_backward=((16384, 0.17), (32768, 0.32), (65536, 0.37), (131072, 0.38), (262144, 0.39)),
    memory=0.66,
)
OTHER = Efficiency(
    matmul=((128, 0.30), (512, 0.50), (2048, 0.65)),
    attention=((16384, 0.20), (65536, 0.40), (262144, 0.45)),
    attention_backward=((16384, 0.20), (65536, 0.35), (262144, 0.40)),
    memory=0.7,
)
"""By analogy, not measured."""


def share(table: Table, size: float) -> float:
    """The share of the peak at a size: proportional below the table, constant above."""
    if size <= table[0][0]:
        return table[0][1] * size / table[0][0]
    for (low, at_low), (high, at_high) in pairwise(table):
        if size <= high:
            return at_low + (at_high - at_low) * math.log(size / low) / math.log(high / low)
    return table[-1][1]
