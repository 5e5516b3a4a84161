"""The devices that are known by name: what their makers state, and where.

Rates are peaks per second and direction.  What of a peak is reached is in `efficiency`.
"""

from __future__ import annotations

from dataclasses import dataclass

from debubble.costs.efficiency import AMPERE, BLACKWELL, HOPPER, OTHER, Efficiency
from debubble.ir.stage_costs import HostLink
from debubble.registry import Registry

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
