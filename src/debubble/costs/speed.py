"""Times of products, memory traffic and messages on one type of device."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.costs.known_hardware import Hardware, share


@dataclass(frozen=True)
class Speed:
    """Roofline: whatever takes longest of compute and memory.  All times are seconds."""

    hardware: Hardware
    element: int
    """Bytes of a number."""

    @property
    def peak(self) -> float:
        """Operations per second at most: tensor cores take fp32 (as TF32) at half the pace of bf16."""
        return self.hardware.flops * 2 / max(self.element, 2)

    def matmul(self, m: float, k: float, n: float) -> float:
        """An (m, k) matrix times a (k, n) one."""
        hw = self.hardware
        compute = 2 * m * k * n / (self.peak * share(hw.efficiency.matmul, min(m, k, n)))
        return max(compute + hw.efficiency.launch, self.stream(self.element * (m * k + k * n + m * n)))

    def stream(self, size: float) -> float:
        """Read and write that many bytes of device memory altogether."""
        if not size:
            return 0.0
        return self.hardware.efficiency.launch + size / self.traffic

    @property
    def traffic(self) -> float:
        """Bytes per second of device memory."""
        return self.hardware.memory_bandwidth * self.hardware.efficiency.memory

    def attention(self, flops: float, *, rows: float, backward: bool = False) -> float:
        """A fused attention core of so many operations, over so many query rows."""
        e = self.hardware.efficiency
        return e.launch + flops / (self.peak * share(e.attention_backward if backward else e.attention, rows))

    def gather(self, size: float, ranks: int, *, beside: int) -> float:
        """All-gather or reduce-scatter of `size` bytes in total over a ring with `beside` neighbours in each node."""
        if not size or ranks == 1:
            return 0.0
        latency, bandwidth = self.ring(ranks, beside=beside)
        return latency + size * (ranks - 1) / ranks / bandwidth

    def ring(self, ranks: int, *, beside: int) -> tuple[float, float]:
        """Latency and bytes per second of such a ring.

        Where it leaves the node, all of its neighbours in a node use their network cards for it.
        """
        hw = self.hardware
        within = hw.link_bandwidth * hw.efficiency.link
        if ranks <= beside:
            return hw.link_latency, within
        return hw.network_latency, min(within, hw.network_bandwidth * hw.efficiency.network * beside)

    def message(self, size: float, *, across_nodes: bool) -> float:
        """From one device to another."""
        hw = self.hardware
        if across_nodes:
            return hw.network_latency + size / (hw.network_bandwidth * hw.efficiency.network)
        return hw.link_latency + size / (hw.link_bandwidth * hw.efficiency.link)
