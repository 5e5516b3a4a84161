"""What of the peak rates real kernels reach, and the times that follow.

Matrix products are bound by compute or by memory; everything else by memory or a link.  How much of the compute
peak a product reaches depends on its smallest side, so the efficiency is a table by shape; one scalar for all
shapes is off by 18% on average on published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from debubble.costs.known_hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peak rates."""

    matmul: tuple[tuple[int, float], ...] = ((128, 0.18), (256, 0.34), (512, 0.50), (1024, 0.62), (2048, 0.70))
    """(smallest side, share of the compute peak), ascending; interpolated in the logarithm of the side."""
    attention: float = 0.55
    """Forward of a fused attention core, of the compute peak."""
    attention_backward: float = 0.45
    memory: float = 0.75
    link: float = 0.75
    network: float = 0.75
    host: float = 0.75

    def of_matmul(self, side: float) -> float:
        """Share of the compute peak for a product whose smallest side is `side`."""
        table = self.matmul
        if side <= table[0][0]:
            return table[0][1] * side / table[0][0]
        for (low, share), (high, above) in pairwise(table):
            if side <= high:
                return share + (above - share) * math.log(side / low) / math.log(high / low)
        return table[-1][1]


@dataclass(frozen=True)
class Speed:
    """Times on one type of device, in seconds."""

    hardware: Hardware
    efficiency: Efficiency
    element: int
    """Bytes of a number."""

    def matmul(self, m: float, k: float, n: float) -> float:
        """An (m, k) matrix times a (k, n) one."""
        compute = 2 * m * k * n / (self.hardware.flops * self.efficiency.of_matmul(min(m, k, n)))
        return max(compute, self.stream(self.element * (m * k + k * n + m * n)))

    def stream(self, size: float) -> float:
        """Read and write that many bytes of device memory altogether."""
        return size / (self.hardware.memory_bandwidth * self.efficiency.memory)

    def attention(self, flops: float, *, backward: bool = False) -> float:
        """A fused attention core of so many operations."""
        share = self.efficiency.attention_backward if backward else self.efficiency.attention
        return flops / (self.hardware.flops * share)

    def gather(self, size: float, ranks: int, *, across_nodes: bool = False) -> float:
        """All-gather or reduce-scatter of `size` bytes in total over a ring."""
        if ranks == 1:
            return 0.0
        return self.message(size * (ranks - 1) / ranks, across_nodes=across_nodes)

    def message(self, size: float, *, across_nodes: bool) -> float:
        """From one device to another."""
        hw, share = self.hardware, self.efficiency
        if across_nodes:
            return hw.network_latency + size / (hw.network_bandwidth * share.network)
        return hw.link_latency + size / (hw.link_bandwidth * share.link)
