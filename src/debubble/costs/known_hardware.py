"""The devices that are known by name: what their makers state and where, and what of it real kernels reach.

Rates are peaks per second and direction.  How much of the compute peak a matrix product reaches depends on its
smallest side, and for an attention core on how many query rows there are to share out, so both are tables: one scalar
for all shapes is off by 18% on average on published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from debubble.ir.stage_costs import HostLink
from debubble.registry import Registry

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


GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One type of device.  Bandwidths are bytes per second and direction, latencies seconds."""

    name: str
    memory: int
    """Bytes, as the driver reports them."""
    flops: float
    """Peak dense bf16 operations per second."""
    memory_bandwidth: float
    link_bandwidth: float
    """To another device of the node."""
    link_latency: float
    network_bandwidth: float
    """To another node; each device has its own share of the network cards."""
    network_latency: float
    host_bandwidth: float
    host_link: HostLink
    devices_per_node: int
    devices_per_switch: int
    """How many neighbours share one link to the host."""
    efficiency: Efficiency
    source: str


hardware: Registry[Hardware] = Registry("debubble.costs", what="hardware")

_PCIE3, _PCIE4, _PCIE5 = 15.75e9, 31.5e9, 63e9
_INFINIBAND_200, _INFINIBAND_400 = 25e9, 50e9
_NVLINK_LATENCY, _PCIE_LATENCY, _NETWORK_LATENCY = 10e-6, 15e-6, 20e-6


def _add(name: str, **entries: object) -> None:
    common = {
        "name": name,
        "link_latency": _NVLINK_LATENCY,
        "network_latency": _NETWORK_LATENCY,
        "host_link": "full-duplex",
        "devices_per_node": 8,
        "devices_per_switch": 1,
        "efficiency": OTHER,
    }
    hardware.add(name, Hardware(**{**common, **entries}))  # type: ignore[arg-type]


_AMPERE = {
    "flops": 312e12,
    "network_bandwidth": _INFINIBAND_200,
    "host_bandwidth": _PCIE4,
    "devices_per_switch": 2,
    "efficiency": AMPERE,
}
_HOPPER = {"flops": 989e12, "network_bandwidth": _INFINIBAND_400, "host_bandwidth": _PCIE5, "efficiency": HOPPER}

_add("A100-40GB", **_AMPERE, memory=40 * GIB, memory_bandwidth=1555e9, link_bandwidth=300e9,
     source="NVIDIA A100 datasheet (SXM4, 40 GB); DGX A100: 8 HDR cards, two GPUs per PCIe switch")  # fmt: skip
_add("A100-80GB", **_AMPERE, memory=80 * GIB, memory_bandwidth=2039e9, link_bandwidth=300e9,
     source="NVIDIA A100 datasheet (SXM4, 80 GB); DGX A100: 8 HDR cards, two GPUs per PCIe switch")  # fmt: skip
_add("A800-80GB", **_AMPERE, memory=80 * GIB, memory_bandwidth=2039e9, link_bandwidth=200e9,
     source="NVIDIA A800 datasheet (SXM4, 80 GB; NVLink at 400 GB/s both ways)")  # fmt: skip
_add("H100-80GB", **_HOPPER, memory=80 * GIB, memory_bandwidth=3350e9, link_bandwidth=450e9,
     source="NVIDIA H100 datasheet (SXM5); DGX H100: one NDR card and PCIe 5 link per GPU")  # fmt: skip
_add("H800-80GB", **_HOPPER, memory=80 * GIB, memory_bandwidth=3350e9, link_bandwidth=200e9,
     source="NVIDIA H800 datasheet (SXM5; NVLink at 400 GB/s both ways)")  # fmt: skip
_add("H200-141GB", **_HOPPER, memory=140 * GIB, memory_bandwidth=4800e9, link_bandwidth=450e9,
     source="NVIDIA H200 datasheet (SXM); 143771 MiB reported by the driver")  # fmt: skip
_add("B200-192GB", efficiency=BLACKWELL, memory=179 * GIB, flops=2250e12, memory_bandwidth=7700e9, link_bandwidth=900e9,
     network_bandwidth=_INFINIBAND_400, host_bandwidth=_PCIE5,
     source="NVIDIA HGX B200 datasheet; 183359 MiB reported by the driver")  # fmt: skip
_add("L40S-48GB", efficiency=AMPERE, memory=45 * GIB, flops=362e12, memory_bandwidth=864e9, link_bandwidth=_PCIE4,
     link_latency=_PCIE_LATENCY, network_bandwidth=_INFINIBAND_200, host_bandwidth=_PCIE4, devices_per_switch=2,
     source="NVIDIA L40S datasheet (PCIe 4, no NVLink); 46068 MiB reported by the driver")  # fmt: skip
_add("RTX5090-32GB", memory=32 * GIB, flops=209.5e12, memory_bandwidth=1792e9, link_bandwidth=_PCIE5,
     link_latency=_PCIE_LATENCY, network_bandwidth=12.5e9, host_bandwidth=_PCIE5,
     source="NVIDIA RTX Blackwell whitepaper (bf16 with fp32 accumulation; PCIe 5, no NVLink)")  # fmt: skip
_add("V100-32GB", memory=32 * GIB, flops=112e12, memory_bandwidth=900e9, link_bandwidth=_PCIE3,
     link_latency=_PCIE_LATENCY, network_bandwidth=12.5e9, host_bandwidth=_PCIE3, devices_per_switch=2,
     source="NVIDIA V100 datasheet (PCIe, 32 GB; the peak is fp16's, it has no bf16)")  # fmt: skip
_add("Ascend-910-64GB", memory=64 * GIB, flops=376e12, memory_bandwidth=1600e9, link_bandwidth=196e9,
     network_bandwidth=_INFINIBAND_200, host_bandwidth=_PCIE5,
     source="Atlas 800T A2 (Ascend 910B2) as reported publicly; Huawei publishes no full datasheet")  # fmt: skip
_add("CPU", memory=4 * GIB, flops=100e9, memory_bandwidth=10e9, link_bandwidth=2e9, link_latency=1e-4,
     network_bandwidth=1e9, network_latency=1e-3, host_bandwidth=5e9,
     source="one core of a current server, by order of magnitude (fp32 at half the peak): profile it")  # fmt: skip
