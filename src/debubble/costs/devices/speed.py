"""Times of products, memory traffic and messages on one type of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from debubble.costs.devices.known_hardware import GRAPH_LAUNCH, Hardware, share
from debubble.costs.frameworks import MEGATRON, Framework
from debubble.ir import InputError

ELEMENT: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp8": 2, "mxfp8": 2, "nvfp4": 2, "fp32": 4}
"""Dtype of a run -> bytes of a number; in fp8 and fp4 all tensors but the operands of linear layers are bf16."""

PRODUCT_BYTES: Mapping[str, float] = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Dtype that only operands of linear layers have -> bytes of a number with its scales."""


def _product_peak(hardware: Hardware, dtype: str) -> float:
    return hardware.fp4_flops if dtype == "nvfp4" else hardware.fp8_flops


def element_bytes(dtype: str) -> int:
    """Bytes of a number in a run's dtype; raises InputError for an unknown dtype."""
    if dtype not in ELEMENT:
        raise InputError(f"There is no dtype '{dtype}'; there are: {', '.join(ELEMENT)}.")
    return ELEMENT[dtype]


FLASH_1_SPEED = 0.6
"""Throughput of FlashAttention-1 as a fraction of FlashAttention-2's, which is 1.7 to 2 times as fast (Dao 2023)."""
TABLE_HEAD_DIM = 128
"""The head dimension for which the attention efficiency tables hold."""


@dataclass(frozen=True)
class Speed:
    """Roofline model of one device: the maximum of compute time and memory time.  All times are seconds."""

    hardware: Hardware
    element: int
    """Bytes of a number."""
    product: str | None = None
    """The fp8 or fp4 dtype of linear layers in decoder layers; None: the run's dtype."""
    framework: Framework = MEGATRON
    """The framework whose kernels run."""

    @staticmethod
    def from_hardware(hardware: Hardware, dtype: str, framework: Framework = MEGATRON) -> Speed:
        """The speed of a run in a dtype; raises InputError if the hardware does not support the dtype."""
        if dtype in PRODUCT_BYTES and not _product_peak(hardware, dtype):
            peak = "fp4_flops" if dtype == "nvfp4" else "fp8_flops"
            raise InputError(f"{hardware.name} has no {dtype}: give --dtype bf16, or {peak} in a cluster file.")
        if (dtype == "bf16" or dtype in PRODUCT_BYTES) and not hardware.bf16:
            raise InputError(f"{hardware.name} has no bf16: give --dtype fp16 or fp32.")
        return Speed(hardware, element_bytes(dtype), dtype if dtype in PRODUCT_BYTES else None, framework)

    @property
    def peak(self) -> float:
        """Peak operations per second: tensor cores run fp32 (as TF32) at half the rate of bf16."""
        return self.hardware.flops * 2 / max(self.element, 2)

    @property
    def product_peak(self) -> float:
        """Peak operations per second of linear layers."""
        return self.peak if self.product is None else _product_peak(self.hardware, self.product)

    @property
    def product_bytes(self) -> float:
        """Bytes of a number in an operand of linear layers."""
        return self.element if self.product is None else PRODUCT_BYTES[self.product]

    @property
    def launch(self) -> float:
        """Fixed seconds per operator."""
        return GRAPH_LAUNCH if self.framework.graphs == "step" else self.hardware.efficiency.launch

    def linear(
        self, m: float, k: float, n: float, *, count: float = 1, added: float = 0.0, cast: float = 0, kernels: float = 1
    ) -> float:  # fmt: skip
        """Seconds of `count` products of (m, k) with (k, n) matrices in linear layers, in fp8 if the run is.

        The products take `kernels` kernels, and so do the casts before them, which read `cast` numbers in bf16 and
        write them in fp8 twice, by rows and by columns (4 bytes).  These are the inputs in the forward and the output
        gradients in the backward; weight gradients use the columns.  Weights are cast once per step (Transformer
        Engine).
        """
        if self.product is None:
            return self.matmul(m, k, n, count=count, added=added, kernels=kernels)
        hw = self.hardware
        reached = hw.efficiency.of_product(self.product) * share(hw.efficiency.matmul, min(m, k, n))
        compute = 2 * count * m * k * n / (self.product_peak * reached)
        casts = self.stream(2 * (1 + self.product_bytes) * cast) + (kernels - 1) * self.launch * (cast > 0)
        traffic = count * (m * k + k * n) + (added or self.element * count * m * n)
        return casts + max(compute + kernels * self.launch, self.stream(traffic))

    def matmul(
        self, m: float, k: float, n: float, *, count: float = 1, added: float = 0.0, kernels: float = 1
    ) -> float:  # fmt: skip
        """Seconds of `count` products of (m, k) with (k, n) matrices in the run's 16- or 32-bit dtype.

        Results are written to memory, or accumulated there, which moves `added` bytes.
        """
        hw = self.hardware
        compute = 2 * count * m * k * n / (self.peak * share(hw.efficiency.matmul, min(m, k, n)))
        traffic = self.element * count * (m * k + k * n) + (added or self.element * count * m * n)
        return max(compute + kernels * self.launch, self.stream(traffic))

    def stream(self, size: float) -> float:
        """Seconds to read and write `size` bytes of device memory in total."""
        if not size:
            return 0.0
        return self.launch + size / self.traffic

    def permute(self, size: float) -> float:
        """Seconds to read and write `size` bytes in total while tokens are sorted by expert."""
        return self.launch + size / (self.hardware.memory_bandwidth * self.hardware.efficiency.permute)

    @property
    def traffic(self) -> float:
        """Achieved bytes per second of device memory."""
        return self.hardware.memory_bandwidth * self.hardware.efficiency.memory

    def attention(
        self, flops: float, *, rows: float, width: float = TABLE_HEAD_DIM, backward: bool = False
    ) -> float:  # fmt: skip
        """Seconds of a fused attention core of `flops` operations on `rows` query rows, with heads of `width`."""
        e = self.hardware.efficiency
        generation: float = {"fused": 1.0, "flash-2": e.flash_2, "flash-1": e.flash_2 * FLASH_1_SPEED}[
            self.framework.attention
        ]
        narrow: float = min(1.0, width / TABLE_HEAD_DIM) ** e.narrow_heads
        reached = generation * narrow * share(e.attention_backward if backward else e.attention, rows)
        return self.launch + flops / (self.peak * reached)

    def gather(self, size: float, ranks: int, *, alongside: int) -> float:
        """Seconds to all-gather or reduce-scatter `size` bytes over a ring with `alongside` ranks in each node."""
        if not size or ranks == 1:
            return 0.0
        latency, bandwidth = self.ring(ranks, alongside=alongside)
        return latency + size * (ranks - 1) / ranks / bandwidth

    def all_to_all(self, *, within: float, crossing: float, reached: float | None = None) -> float:
        """Seconds of an all-to-all: the maximum of its transfers within nodes and between nodes.

        Between nodes every rank uses its own network card.

        Args:
            within: Bytes that a rank sends to other ranks of its node.
            crossing: Bytes that it sends to other nodes; 0: all ranks are in one node.
            reached: Achieved fraction of the bandwidths; None: the hardware's.
        """
        if not within + crossing:
            return 0.0
        hw = self.hardware
        inside = within / (hw.link_bandwidth * (reached or hw.efficiency.link))
        if not crossing:
            return hw.link_latency + inside
        outside = crossing / (hw.network_bandwidth * (reached or hw.efficiency.network))
        return hw.network_latency + max(inside, outside)

    def ring(self, ranks: int, *, alongside: int) -> tuple[float, float]:
        """Latency and bytes per second of a ring with `alongside` ranks in each node.

        Between nodes it uses the network cards of all its ranks in a node.
        """
        hw = self.hardware
        within = hw.link_bandwidth * hw.efficiency.link
        if ranks <= alongside:
            return hw.link_latency, within
        return hw.network_latency, min(within, hw.network_bandwidth * hw.efficiency.network * alongside)

    def message(self, size: float, *, across_nodes: bool) -> float:
        """Seconds of a point-to-point message of `size` bytes."""
        hw = self.hardware
        if across_nodes:
            return hw.network_latency + size / (hw.network_bandwidth * hw.efficiency.network)
        return hw.link_latency + size / (hw.link_bandwidth * hw.efficiency.link)
