"""Times of products, memory traffic and messages on one type of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from debubble.costs.devices.known_hardware import GRAPH_LAUNCH, Hardware, share
from debubble.costs.frameworks import MEGATRON, Framework
from debubble.ir import InputError

ELEMENT: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp8": 2, "mxfp8": 2, "nvfp4": 2, "fp32": 4}
"""Bytes of a number in each dtype; runs in fp8 keep everything in bf16 but the operands of linear layers."""

PRODUCT_BYTES: Mapping[str, float] = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an operand of linear layers in each of the dtypes that are theirs alone, with its scales."""


def _product_peak(hardware: Hardware, dtype: str) -> float:
    return hardware.fp4_flops if dtype == "nvfp4" else hardware.fp8_flops


def element_bytes(dtype: str) -> int:
    """Bytes of a number; raises InputError for an unknown dtype."""
    if dtype not in ELEMENT:
        raise InputError(f"There is no dtype '{dtype}'; there are: {', '.join(ELEMENT)}.")
    return ELEMENT[dtype]


FLASH_1 = 0.6
"""The pace of FlashAttention-1, as a share of FlashAttention-2's (Dao 2023: 1.7 to 2 times as fast)."""
WIDE_HEAD = 128
"""The width of heads that the tables of attention are for."""


@dataclass(frozen=True)
class Speed:
    """Roofline: whatever takes longest of compute and memory.  All times are seconds."""

    hardware: Hardware
    element: int
    """Bytes of a number."""
    product: str | None = None
    """The dtype of linear layers of the model's layers, if it is their own."""
    framework: Framework = MEGATRON
    """Whose kernels run."""

    @staticmethod
    def of(hardware: Hardware, dtype: str, framework: Framework = MEGATRON) -> Speed:
        """The speed of a run in this dtype; raises InputError if the hardware does not have it."""
        if dtype in PRODUCT_BYTES and not _product_peak(hardware, dtype):
            peak = "fp4_flops" if dtype == "nvfp4" else "fp8_flops"
            raise InputError(f"{hardware.name} has no {dtype}: give --dtype bf16, or {peak} in a cluster file.")
        if (dtype == "bf16" or dtype in PRODUCT_BYTES) and not hardware.bf16:
            raise InputError(f"{hardware.name} has no bf16: give --dtype fp16 or fp32.")
        return Speed(hardware, element_bytes(dtype), dtype if dtype in PRODUCT_BYTES else None, framework)

    @property
    def peak(self) -> float:
        """Operations per second at most: tensor cores take fp32 (as TF32) at half the pace of bf16."""
        return self.hardware.flops * 2 / max(self.element, 2)

    @property
    def product_peak(self) -> float:
        """Operations per second of linear layers at most."""
        return self.peak if self.product is None else _product_peak(self.hardware, self.product)

    @property
    def product_bytes(self) -> float:
        """Bytes of an operand of linear layers."""
        return self.element if self.product is None else PRODUCT_BYTES[self.product]

    @property
    def launch(self) -> float:
        """Seconds that every operator takes on top of its work."""
        return GRAPH_LAUNCH if self.framework.graphs == "step" else self.hardware.efficiency.launch

    def linear(
        self, m: float, k: float, n: float, *, count: float = 1, added: float = 0.0, cast: float = 0, kernels: float = 1
    ) -> float:  # fmt: skip
        """Seconds of `count` (m, k) matrices times (k, n) ones in linear layers, in fp8 if the run is.

        Before, `cast` numbers are read in bf16 and written in fp8 twice, by rows and by columns (4 bytes).  These are
        inputs forward and their outputs' gradients backward, of which weights' gradients use the columns; weights are
        cast once per step (Transformer Engine).  So many `kernels` share the products, and the casts.
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
        """Seconds of `count` (m, k) matrices times (k, n) ones in the run's 16- or 32-bit numbers, by some kernels.

        Results are written, or, if that moves `added` bytes, added to what is in memory.
        """
        hw = self.hardware
        compute = 2 * count * m * k * n / (self.peak * share(hw.efficiency.matmul, min(m, k, n)))
        traffic = self.element * count * (m * k + k * n) + (added or self.element * count * m * n)
        return max(compute + kernels * self.launch, self.stream(traffic))

    def stream(self, size: float) -> float:
        """Seconds in which so many bytes of device memory are read and written altogether."""
        if not size:
            return 0.0
        return self.launch + size / self.traffic

    def permute(self, size: float) -> float:
        """Seconds in which so many bytes are read and written altogether while tokens are sorted by expert."""
        return self.launch + size / (self.hardware.memory_bandwidth * self.hardware.efficiency.permute)

    @property
    def traffic(self) -> float:
        """Bytes per second of device memory."""
        return self.hardware.memory_bandwidth * self.hardware.efficiency.memory

    def attention(
        self, flops: float, *, rows: float, width: float = WIDE_HEAD, backward: bool = False
    ) -> float:  # fmt: skip
        """Seconds of a fused attention core of so many operations, over so many query rows, with heads so wide."""
        e = self.hardware.efficiency
        older: float = {"fused": 1.0, "flash-2": e.flash_2, "flash-1": e.flash_2 * FLASH_1}[self.framework.attention]
        narrow: float = min(1.0, width / WIDE_HEAD) ** e.narrow_heads
        reached = older * narrow * share(e.attention_backward if backward else e.attention, rows)
        return self.launch + flops / (self.peak * reached)

    def gather(self, size: float, ranks: int, *, alongside: int) -> float:
        """Seconds to all-gather or reduce-scatter `size` bytes over a ring with `alongside` ranks in each node."""
        if not size or ranks == 1:
            return 0.0
        latency, bandwidth = self.ring(ranks, alongside=alongside)
        return latency + size * (ranks - 1) / ranks / bandwidth

    def all_to_all(self, *, within: float, crossing: float, reached: float | None = None) -> float:
        """Seconds of an all-to-all in which every rank sends so many bytes within its node, and so many to other nodes.

        What leaves a node goes through each rank's own network card, at the same time as the rest over the node's
        links; the longer one counts.

        Args:
            within: Bytes that a rank sends to others of its node.
            crossing: Bytes that it sends to other nodes; 0: all ranks share one.
            reached: Share of the bandwidths that these reach; None: the hardware's.
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
        """Latency and bytes per second of such a ring.

        Where it leaves the node, all of its neighbours in a node use their network cards for it.
        """
        hw = self.hardware
        within = hw.link_bandwidth * hw.efficiency.link
        if ranks <= alongside:
            return hw.link_latency, within
        return hw.network_latency, min(within, hw.network_bandwidth * hw.efficiency.network * alongside)

    def message(self, size: float, *, across_nodes: bool) -> float:
        """Seconds that a message of `size` bytes takes from one device to another."""
        hw = self.hardware
        if across_nodes:
            return hw.network_latency + size / (hw.network_bandwidth * hw.efficiency.network)
        return hw.link_latency + size / (hw.link_bandwidth * hw.efficiency.link)
