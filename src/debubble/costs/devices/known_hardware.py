"""The devices that are known by name: datasheet figures with their sources, and the efficiencies of real kernels.

Rates are peaks per second and direction.  The efficiency of a matrix product depends on its smallest side, and that of
an attention core on the number of its query rows, so both are tables: one scalar for all shapes is off by 18% on
average on published runs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise

from debubble.errors import InputError
from debubble.ir.stage_costs import HostLink
from debubble.registry import Registry, full_name

Table = tuple[tuple[float, float], ...]
"""(size, fraction of the peak) by ascending size; interpolated in the logarithm of the size."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Achieved fractions of the peak rates."""

    matmul: Table
    """Efficiency by the smallest side of the product."""
    attention: Table
    """Forward of a fused attention core, by query rows (sequences x tokens x heads)."""
    attention_backward: Table
    memory: float = 0.8
    fp8: float = 0.88
    """Efficiency of fp8 products on the fp8 peak, relative to that of bf16 products on theirs."""
    mxfp8: float = 0.88
    """The same with a scale per 32 numbers."""
    nvfp4: float = 0.88
    """The same on the 4-bit peak with a scale per 16 numbers."""
    flash_2: float = 1.0
    """Throughput of FlashAttention-2 relative to the attention tables."""
    narrow_heads: float = 0.0
    """For heads narrower than 128, the throughput of attention scales with (width / 128) to this exponent."""
    grouped_weight: float = 0.7
    """Throughput of weight gradients of several experts in one kernel, relative to a single product."""
    permute: float = 0.25
    """Fraction of the memory bandwidth of kernels that sort tokens by expert."""
    link: float = 0.7
    network: float = 0.7
    host: float = 0.75
    launch: float = 15e-6
    """Fixed seconds per operator."""

    def at_clock(self, clock: float) -> Efficiency:
        """The efficiencies at `clock` times the clock, relative to the same peaks."""

        def scaled(table: Table) -> Table:
            return tuple((size, reached * clock) for size, reached in table)

        return replace(
            self, matmul=scaled(self.matmul), attention=scaled(self.attention),
            attention_backward=scaled(self.attention_backward),
        )  # fmt: skip

    def of_product(self, dtype: str) -> float:
        """The efficiency of products in an fp8 or fp4 dtype, relative to that of bf16."""
        return {"fp8": self.fp8, "mxfp8": self.mxfp8, "nvfp4": self.nvfp4}[dtype]


# A100 and B200: SimuMax's published micro-benchmarks (its A100 is PCIe), averaged over the layouts of forward and
# backward; `permute` and `grouped_weight` are measured there on A100 and B200, and by analogy elsewhere.  Products are
# taken 10% faster on the SXM A100 (fits Korthikanti et al.'s layer times) and 7% slower on B200 (clocks under sustained
# load).
# Hopper: products are XLA's published H100 table (xla/service/gpu/model/matmul_interpolator_data.h, sm_90), which was
# measured in short runs, times 0.82 (clocks under sustained load; fits NVIDIA's dense runs in docs/notes/published.md).
# Attention is cuDNN 9 in Shah et al. 2024 (FlashAttention-3, figures 5 and 6) times 0.82.  fp8 products reach 0.709 of
# the peak where bf16 reaches 0.803 (Bekman, ml-engineering, "Maximum Achievable Matmul FLOPS", H100).
# FlashAttention-2 reaches 335 of 600 TFLOP/s at a head dimension of 128, and 0.66 times that at 64 (Shah et al. 2024,
# figure 5); on A100 0.87 times (Dao 2023, figure 4); Blackwell has Hopper's values.
# Blackwell's 8- and 4-bit products, and Blackwell Ultra's clock (1.2 times, with its higher power limit), are fitted to
# the fp8, mxfp8 and nvfp4 runs of Llama-3 in the fit half of benchmarks/measured (Megatron-Bridge 25.09 to 26.06).
AMPERE = Efficiency(
    matmul=((128, 0.22), (256, 0.42), (512, 0.64), (1024, 0.70), (2048, 0.77), (4096, 0.80)),
    attention=((16384, 0.26), (32768, 0.39), (65536, 0.48), (131072, 0.54), (262144, 0.56)),
    attention_backward=((16384, 0.34), (32768, 0.38), (65536, 0.42), (131072, 0.45), (262144, 0.47)),
    grouped_weight=0.82,
    permute=0.19,
    narrow_heads=0.2,
)
HOPPER = Efficiency(
    matmul=((128, 0.21), (256, 0.37), (512, 0.51), (1024, 0.60), (2048, 0.64), (4096, 0.66)),
    attention=((16384, 0.21), (32768, 0.33), (65536, 0.43), (131072, 0.47), (262144, 0.50)),
    attention_backward=((16384, 0.25), (32768, 0.31), (65536, 0.37), (131072, 0.39), (262144, 0.42)),
    flash_2=0.55,
    narrow_heads=0.6,
)
BLACKWELL = Efficiency(
    matmul=((128, 0.17), (256, 0.23), (512, 0.41), (1024, 0.48), (2048, 0.46), (4096, 0.45)),
    attention=((16384, 0.08), (32768, 0.16), (65536, 0.29), (131072, 0.37), (262144, 0.43), (524288, 0.48)),
    attention_backward=((16384, 0.17), (32768, 0.32), (65536, 0.37), (131072, 0.38), (262144, 0.39)),
    memory=0.66,
    fp8=1.2,
    mxfp8=1.14,
    nvfp4=1.08,
    flash_2=0.55,
    grouped_weight=0.58,
    permute=0.50,
    narrow_heads=0.6,
)
BLACKWELL_ULTRA = replace(BLACKWELL.at_clock(1.2), fp8=1.23, mxfp8=1.2, nvfp4=0.75)
OTHER = Efficiency(
    matmul=((128, 0.30), (512, 0.50), (2048, 0.65)),
    attention=((16384, 0.20), (65536, 0.40), (262144, 0.45)),
    attention_backward=((16384, 0.20), (65536, 0.35), (262144, 0.40)),
    memory=0.7,
)
"""Efficiency by analogy, not measured."""


def share(table: Table, size: float) -> float:
    """The fraction of the peak at a size: proportional to the size below the table, constant above."""
    if size <= table[0][0]:
        return table[0][1] * size / table[0][0]
    for (low, at_low), (high, at_high) in pairwise(table):
        if size <= high:
            return at_low + (at_high - at_low) * math.log(size / low) / math.log(high / low)
    return table[-1][1]


GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One type of device.  Bandwidths are bytes per second and direction, latencies seconds."""

    name: str
    memory: int
    """Bytes, as the driver reports them."""
    flops: float
    """Peak dense operations per second on 16-bit numbers, with sums in fp32."""
    fp8_flops: float = 0.0
    """Peak dense operations per second on fp8; 0: the device has none."""
    fp4_flops: float = 0.0
    """Peak dense operations per second on 4 bits; 0: the device has none."""
    power: float = 0.0
    """Power limit in watts; 0: not stated."""
    bf16: bool = True
    """True if it supports bf16; all devices support fp16."""
    memory_bandwidth: float
    link_bandwidth: float
    """To another device of the node."""
    link_latency: float
    network_bandwidth: float
    """To another node, per device."""
    network_latency: float
    host_bandwidth: float
    host_link: HostLink
    host_memory: int = 0
    """Bytes of host memory per device of a typical server; 0: unknown, without a limit."""
    devices_per_node: int
    devices_per_switch: int
    """Number of devices that share one host link."""
    efficiency: Efficiency
    source: str
    peak_known: bool = True
    """False: the peak is an estimate of its order of magnitude, so that no utilization is reported."""
    url: str = ""
    """The vendor's page with these figures; empty: there is none."""


GRAPH_LAUNCH = 3e-6
"""Seconds between two kernels of a CUDA graph."""
HOST_CALL = 140e-6
"""Host seconds per call of a module, forward or backward (fitted to mixtures of experts of Megatron-Bridge without CUDA
graphs, H100 and B200)."""

hardware: Registry[Hardware] = Registry("debubble.costs", kind="device")

PCIE3, PCIE4, PCIE5 = 15.75e9, 31.5e9, 63e9
"""Bytes per second and direction of 16 PCIe lanes."""
NVLINK_LATENCY, PCIE_LATENCY, NETWORK_LATENCY = 10e-6, 15e-6, 20e-6
_ETHERNET_100, _INFINIBAND_200, _INFINIBAND_400, _INFINIBAND_800 = 12.5e9, 25e9, 50e9, 100e9


def find_hardware(name: str) -> Hardware:
    """Look up a device by its name, by the name without the memory size (`H100`), or by a unique prefix.

    Vendor words are ignored, and so is the order of words: `RTX-A6000` and `NVIDIA A6000` are `A6000`.  Raises
    InputError if no device matches, or several do.
    """
    wanted = _words(name)
    matches = [known for known in hardware if wanted in (_words(known), _words(re.sub(r"-\d+GB$", "", known)))]
    if len(matches) == 1:
        return hardware[matches[0]]
    try:
        return hardware[full_name(name, matches or hardware, kind="device")]
    except InputError as error:
        if "may be" in str(error):
            raise
        raise InputError(f"{error}  A cluster file describes any other under `hardware` (docs/costs.md).") from None


def _words(name: str) -> str:
    """The words and numbers of a name in alphabetical order, without vendor words."""
    return " ".join(sorted(re.findall(r"[a-z]+|[0-9.]+", re.sub(r"nvidia|geforce|tesla|rtx", "", name.lower()))))


HOST_SHARE = 0.9
"""Fraction of a server's memory that plans may use; the rest is for the system and data loading."""


def _add(name: str, **entries: object) -> None:
    common = {
        "name": name,
        "link_latency": NVLINK_LATENCY,
        "network_latency": NETWORK_LATENCY,
        "host_link": "full-duplex",
        "devices_per_node": 8,
        "devices_per_switch": 1,
        "efficiency": OTHER,
    }
    device = Hardware(**{**common, **entries})  # type: ignore[arg-type]
    hardware.add(name, replace(device, host_memory=int(HOST_SHARE * device.host_memory)))


_AMPERE = {
    "flops": 312e12, "network_bandwidth": _INFINIBAND_200, "host_bandwidth": PCIE4, "devices_per_switch": 2,
    "efficiency": AMPERE,
}  # fmt: skip
_HOPPER = {
    "flops": 989e12, "fp8_flops": 1979e12, "network_bandwidth": _INFINIBAND_400, "host_bandwidth": PCIE5,
    "efficiency": HOPPER, "host_memory": 256 * GIB, "power": 700.0,
}  # fmt: skip
_BLACKWELL = {
    "flops": 2250e12, "fp8_flops": 4500e12, "fp4_flops": 9000e12, "link_bandwidth": 900e9,
    "network_bandwidth": _INFINIBAND_400, "host_bandwidth": PCIE5, "efficiency": BLACKWELL, "host_memory": 256 * GIB,
    "power": 1000.0,
}  # fmt: skip
_PCIE_4_CARD = {
    "link_bandwidth": PCIE4, "link_latency": PCIE_LATENCY, "network_bandwidth": _INFINIBAND_200,
    "host_bandwidth": PCIE4, "devices_per_switch": 2, "host_memory": 128 * GIB,
}  # fmt: skip
_WORKSTATION = {
    "link_latency": PCIE_LATENCY, "network_bandwidth": _ETHERNET_100, "host_memory": 64 * GIB,
}  # fmt: skip
_INSTINCT = {
    "flops": 1307.4e12, "fp8_flops": 2614.9e12, "link_bandwidth": 7 * 64e9, "network_bandwidth": _INFINIBAND_400,
    "host_bandwidth": PCIE5, "host_memory": 256 * GIB,
}  # fmt: skip
_TPU = {"host_bandwidth": PCIE3, "host_memory": 64 * GIB, "devices_per_node": 256}

_add("A100-40GB", **_AMPERE, memory=40 * GIB, memory_bandwidth=1555e9, link_bandwidth=300e9, host_memory=128 * GIB,
     source="NVIDIA A100 datasheet (SXM4, 40 GB); DGX A100: 8 HDR cards, two GPUs per PCIe switch, 1 TB",
     url="https://www.nvidia.com/en-us/data-center/a100/")  # fmt: skip
_add("A100-80GB", **_AMPERE, memory=80 * GIB, memory_bandwidth=2039e9, link_bandwidth=300e9, host_memory=256 * GIB,
     source="NVIDIA A100 datasheet (SXM4, 80 GB); DGX A100: 8 HDR cards, two GPUs per PCIe switch, 2 TB",
     url="https://www.nvidia.com/en-us/data-center/a100/")  # fmt: skip
_add("A800-80GB", **_AMPERE, memory=80 * GIB, memory_bandwidth=2039e9, link_bandwidth=200e9, host_memory=256 * GIB,
     source="NVIDIA A800 datasheet (SXM4, 80 GB; NVLink at 400 GB/s both ways)")  # fmt: skip
_add("A800-PCIe-80GB", **_AMPERE, memory=80 * GIB, memory_bandwidth=1935e9, link_bandwidth=PCIE4,
     link_latency=PCIE_LATENCY, host_memory=256 * GIB,
     source="NVIDIA A800 datasheet (PCIe 4, 80 GB); messages over PCIe: NVLink bridges join pairs alone")  # fmt: skip
_add("H100-80GB", **_HOPPER, memory=80 * GIB, memory_bandwidth=3350e9, link_bandwidth=450e9,
     source="NVIDIA H100 datasheet (SXM5); DGX H100: one NDR card and PCIe 5 link per GPU, 2 TB",
     url="https://www.nvidia.com/en-us/data-center/h100/")  # fmt: skip
_add("H100-PCIe-80GB", **{**_HOPPER, "flops": 756e12, "fp8_flops": 1513e12, "network_bandwidth": _INFINIBAND_200},
     memory=81559 * _MIB, memory_bandwidth=2039e9, link_bandwidth=PCIE5, link_latency=PCIE_LATENCY,
     devices_per_switch=2,
     source="NVIDIA H100 PCIe product brief; messages over PCIe 5, as NVLink bridges join pairs alone",
     url="https://www.nvidia.com/content/dam/en-zz/Solutions/gtcs22/data-center/h100/PB-11133-001_v01.pdf")  # fmt: skip
_add("H100-NVL-94GB", **{**_HOPPER, "flops": 835e12, "fp8_flops": 1671e12}, memory=95830 * _MIB,
     memory_bandwidth=3938e9, link_bandwidth=PCIE5, link_latency=PCIE_LATENCY, devices_per_switch=2,
     source="NVIDIA H100 NVL product brief; messages over PCIe 5, as NVLink bridges join pairs alone",
     url="https://www.nvidia.com/en-us/data-center/h100/")  # fmt: skip
_add("H800-80GB", **_HOPPER, memory=80 * GIB, memory_bandwidth=3350e9, link_bandwidth=200e9,
     source="NVIDIA H800 datasheet (SXM5; NVLink at 400 GB/s both ways)")  # fmt: skip
_add("H20-96GB", **{**_HOPPER, "flops": 148e12, "fp8_flops": 296e12}, memory=97871 * _MIB, memory_bandwidth=4000e9,
     link_bandwidth=450e9, source="NVIDIA H20 specifications (SXM5, 96 GB), as published by server makers")  # fmt: skip
_add("H200-141GB", **_HOPPER, memory=140 * GIB, memory_bandwidth=4800e9, link_bandwidth=450e9,
     source="NVIDIA H200 datasheet (SXM); 143771 MiB reported by the driver",
     url="https://www.nvidia.com/en-us/data-center/h200/")  # fmt: skip
_add("GH200-96GB", **{**_HOPPER, "flops": 989.5e12, "host_bandwidth": 450e9, "host_memory": 480 * GIB},
     memory=97871 * _MIB, memory_bandwidth=4000e9, link_bandwidth=450e9, devices_per_node=1,
     source="NVIDIA GH200 datasheet (HBM3; NVLink-C2C at 900 GB/s both ways to 480 GB of a Grace)",
     url="https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/")  # fmt: skip
_add("B200-192GB", **_BLACKWELL, memory=179 * GIB, memory_bandwidth=7700e9,
     source="NVIDIA HGX B200 datasheet; 183359 MiB reported by the driver",
     url="https://www.nvidia.com/en-us/data-center/hgx/")  # fmt: skip
_add("GB200-192GB", **{**_BLACKWELL, "flops": 2500e12, "fp8_flops": 5000e12, "fp4_flops": 10000e12,
                       "host_bandwidth": 225e9, "host_memory": 240 * GIB, "power": 1200.0},
     memory=185 * GIB, memory_bandwidth=8000e9, devices_per_node=72,
     source="NVIDIA GB200 NVL72 datasheet (186 GB; a Grace of 480 GB and its NVLink-C2C for two GPUs)",
     url="https://www.nvidia.com/en-us/data-center/gb200-nvl72/")  # fmt: skip
_add("B300-288GB", **{**_BLACKWELL, "fp4_flops": 13500e12, "network_bandwidth": _INFINIBAND_800,
                      "efficiency": BLACKWELL_ULTRA, "power": 1100.0},
     memory=268 * GIB, memory_bandwidth=8000e9,
     source="NVIDIA HGX B300 datasheet (2.1 TB and 72 PFLOP/s sparse fp8 for 8; ConnectX-8)",
     url="https://www.nvidia.com/en-us/data-center/hgx/")  # fmt: skip
_add("GB300-288GB", **{**_BLACKWELL, "flops": 2500e12, "fp8_flops": 5000e12, "fp4_flops": 15000e12,
                       "host_bandwidth": 225e9, "network_bandwidth": _INFINIBAND_800, "host_memory": 240 * GIB,
                       "efficiency": BLACKWELL_ULTRA, "power": 1400.0},
     memory=268 * GIB, memory_bandwidth=8000e9, devices_per_node=72,
     source="NVIDIA GB300 NVL72 datasheet (360 and 720 PFLOP/s sparse in bf16 and fp8 for 72; ConnectX-8; a Grace of"
            " 480 GB and its NVLink-C2C for two GPUs)",
     url="https://www.nvidia.com/en-us/data-center/gb300-nvl72/")  # fmt: skip
_add("L40S-48GB", **_PCIE_4_CARD, efficiency=AMPERE, memory=45 * GIB, flops=362e12, fp8_flops=733e12,
     memory_bandwidth=864e9,
     source="NVIDIA L40S datasheet (PCIe 4, no NVLink); 46068 MiB reported by the driver",
     url="https://www.nvidia.com/en-us/data-center/l40s/")  # fmt: skip
_add("L4-24GB", **_PCIE_4_CARD, memory=23034 * _MIB, flops=121e12, fp8_flops=242.5e12, memory_bandwidth=300e9,
     source="NVIDIA L4 datasheet (PCIe 4, no NVLink; half the peaks, which are sparse)",
     url="https://www.nvidia.com/en-us/data-center/l4/")  # fmt: skip
_add("A40-48GB", **_PCIE_4_CARD, efficiency=AMPERE, memory=46068 * _MIB, flops=149.7e12, memory_bandwidth=696e9,
     source="NVIDIA A40 datasheet; messages over PCIe 4, as NVLink bridges join pairs alone",
     url="https://www.nvidia.com/en-us/data-center/a40/")  # fmt: skip
_add("A10G-24GB", **_PCIE_4_CARD, efficiency=AMPERE, memory=23028 * _MIB, flops=70e12, memory_bandwidth=600e9,
     source="NVIDIA A10G datasheet (AWS g5; PCIe 4, no NVLink)",
     url="https://aws.amazon.com/ec2/instance-types/g5/")  # fmt: skip
_add("A6000-48GB", **_WORKSTATION, efficiency=AMPERE, memory=49140 * _MIB, flops=154.8e12, memory_bandwidth=768e9,
     link_bandwidth=PCIE4, host_bandwidth=PCIE4,
     source="NVIDIA RTX A6000 datasheet; messages over PCIe 4, as NVLink bridges join pairs alone",
     url="https://www.nvidia.com/en-us/design-visualization/rtx-a6000/")  # fmt: skip
_add("RTX6000-Ada-48GB", **_WORKSTATION, efficiency=AMPERE, memory=49140 * _MIB, flops=364.2e12, fp8_flops=728.5e12,
     memory_bandwidth=960e9, link_bandwidth=PCIE4, host_bandwidth=PCIE4,
     source="NVIDIA RTX 6000 Ada datasheet (PCIe 4, no NVLink; half the peaks, which are sparse)",
     url="https://www.nvidia.com/en-us/design-visualization/rtx-6000/")  # fmt: skip
_add("RTX6000-PRO-96GB", **_WORKSTATION, memory=97887 * _MIB, flops=503.8e12, fp8_flops=1007.6e12,
     memory_bandwidth=1792e9, link_bandwidth=PCIE5, host_bandwidth=PCIE5,
     source="NVIDIA RTX PRO Blackwell whitepaper (RTX PRO 6000; fp32 accumulation; PCIe 5, no NVLink)",
     url="https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/")  # fmt: skip
_add("RTX3090-24GB", **_WORKSTATION, efficiency=AMPERE, memory=24 * GIB, flops=71e12, memory_bandwidth=936e9,
     link_bandwidth=PCIE4, host_bandwidth=PCIE4,
     source="NVIDIA GA102 whitepaper (fp32 accumulation); messages over PCIe 4",
     url="https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf")  # fmt: skip
_add("RTX4090-24GB", **_WORKSTATION, efficiency=AMPERE, memory=24564 * _MIB, flops=165.2e12, fp8_flops=330.3e12,
     memory_bandwidth=1008e9, link_bandwidth=PCIE4, host_bandwidth=PCIE4,
     source="NVIDIA Ada whitepaper (fp32 accumulation; PCIe 4, no NVLink)",
     url="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf")  # fmt: skip
_add("RTX5090-32GB", **_WORKSTATION, memory=32 * GIB, flops=209.5e12, fp8_flops=419e12, memory_bandwidth=1792e9,
     link_bandwidth=PCIE5, host_bandwidth=PCIE5,
     source="NVIDIA RTX Blackwell whitepaper (bf16 with fp32 accumulation; PCIe 5, no NVLink)",
     url="https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
         "nvidia-rtx-blackwell-gpu-architecture.pdf")  # fmt: skip
_add("RTX3060-12GB", **_WORKSTATION, efficiency=AMPERE, memory=12 * GIB, flops=25.5e12, memory_bandwidth=360e9,
     link_bandwidth=PCIE4, host_bandwidth=PCIE4,
     source="NVIDIA GeForce RTX 3060 specifications (112 tensor cores at 1.78 GHz, fp32 accumulation; PCIe 4)",
     url="https://www.nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3060-3060ti/")  # fmt: skip
_add("RTX4070Ti-12GB", **_WORKSTATION, efficiency=AMPERE, memory=12282 * _MIB, flops=80.2e12, fp8_flops=160.4e12,
     memory_bandwidth=504.2e9, link_bandwidth=PCIE4, host_bandwidth=PCIE4,
     source="NVIDIA Ada whitepaper (fp32 accumulation; PCIe 4, no NVLink)",
     url="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf")  # fmt: skip
_add("RTX4080-16GB", **_WORKSTATION, efficiency=AMPERE, memory=16376 * _MIB, flops=97.5e12, fp8_flops=194.9e12,
     memory_bandwidth=716.8e9, link_bandwidth=PCIE4, host_bandwidth=PCIE4,
     source="NVIDIA Ada whitepaper (fp32 accumulation; PCIe 4, no NVLink)",
     url="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf")  # fmt: skip
_add("RTX5080-16GB", **_WORKSTATION, memory=16303 * _MIB, flops=112.6e12, fp8_flops=225.1e12, memory_bandwidth=960e9,
     link_bandwidth=PCIE5, host_bandwidth=PCIE5,
     source="NVIDIA RTX Blackwell whitepaper (bf16 with fp32 accumulation; PCIe 5, no NVLink)",
     url="https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
         "nvidia-rtx-blackwell-gpu-architecture.pdf")  # fmt: skip
_add("V100-32GB", memory=32 * GIB, flops=112e12, bf16=False, memory_bandwidth=900e9, link_bandwidth=PCIE3,
     link_latency=PCIE_LATENCY, network_bandwidth=_ETHERNET_100, host_bandwidth=PCIE3, devices_per_switch=2,
     host_memory=64 * GIB, source="NVIDIA V100 datasheet (PCIe, 32 GB; fp16, as it has no bf16)",
     url="https://images.nvidia.com/content/technologies/volta/pdf/"
         "volta-v100-datasheet-update-us-1165301-r5.pdf")  # fmt: skip
_add("T4-16GB", memory=15360 * _MIB, flops=65e12, bf16=False, memory_bandwidth=320e9, link_bandwidth=PCIE3,
     link_latency=PCIE_LATENCY, network_bandwidth=_ETHERNET_100, host_bandwidth=PCIE3, devices_per_switch=2,
     host_memory=48 * GIB, source="NVIDIA T4 datasheet (fp16, as it has no bf16; PCIe 3)",
     url="https://www.nvidia.com/en-us/data-center/tesla-t4/")  # fmt: skip
_add("MI300X-192GB", **_INSTINCT, memory=192 * GIB, memory_bandwidth=5300e9,
     source="AMD Instinct MI300X data sheet (7 Infinity Fabric links of 64 GB/s, all used by a ring of 8)",
     url="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html")  # fmt: skip
_add("MI325X-256GB", **_INSTINCT, memory=256 * GIB, memory_bandwidth=6000e9,
     source="AMD Instinct MI325X data sheet (7 Infinity Fabric links of 64 GB/s, all used by a ring of 8)",
     url="https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html")  # fmt: skip
_add("MI355X-288GB", **{**_INSTINCT, "flops": 2516.6e12, "fp8_flops": 5033.2e12, "link_bandwidth": 7 * 76.8e9},
     memory=288 * GIB, memory_bandwidth=8000e9,
     source="AMD Instinct MI355X data sheet (7 links of 76.8 GB/s, all used by a ring of 8)",
     url="https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html")  # fmt: skip
_add("TPU-v5e-16GB", **_TPU, memory=16 * 10**9, flops=197e12, memory_bandwidth=819e9, link_bandwidth=200e9,
     network_bandwidth=3.125e9,
     source="Google Cloud TPU v5e documentation (ICI at 400 GB/s both ways; a node is a pod of 256)",
     url="https://cloud.google.com/tpu/docs/v5e")  # fmt: skip
_add("TPU-v5p-95GB", **{**_TPU, "devices_per_node": 8960, "host_memory": 112 * GIB},
     memory=95 * 10**9, flops=459e12, memory_bandwidth=2765e9, link_bandwidth=600e9, network_bandwidth=6.25e9,
     source="Google Cloud TPU v5p documentation (ICI at 1,200 GB/s both ways; a node is a pod of 8,960)",
     url="https://cloud.google.com/tpu/docs/v5p")  # fmt: skip
_add("TPU-v6e-32GB", **{**_TPU, "host_memory": 192 * GIB}, memory=32 * 10**9, flops=918e12,
     memory_bandwidth=1638e9, link_bandwidth=400e9,
     network_bandwidth=12.5e9,
     source="Google Cloud TPU v6e documentation (ICI at 800 GB/s both ways; a node is a pod of 256)",
     url="https://cloud.google.com/tpu/docs/v6e")  # fmt: skip
_add("Trainium2-96GB", memory=96 * GIB, flops=667e12, fp8_flops=1299e12, memory_bandwidth=2900e9,
     link_bandwidth=512e9, network_bandwidth=_INFINIBAND_200, host_bandwidth=PCIE4, devices_per_node=16,
     host_memory=128 * GIB,
     source="AWS Neuron documentation, Trainium2 (NeuronLink at 1 TB/s both ways; 16 chips, 2 TB)",
     url="https://awsdocs-neuron.readthedocs-hosted.com/en/latest/about-neuron/arch/neuron-hardware/"
         "trainium2.html")  # fmt: skip
_add("Ascend-910-64GB", memory=64 * GIB, flops=376e12, memory_bandwidth=1600e9, link_bandwidth=196e9,
     network_bandwidth=_INFINIBAND_200, host_bandwidth=PCIE5,
     source="Atlas 800T A2 (Ascend 910B2) as reported publicly; Huawei publishes no full datasheet")  # fmt: skip
_add("CPU", memory=4 * GIB, flops=100e9, memory_bandwidth=10e9, link_bandwidth=2e9, link_latency=1e-4,
     network_bandwidth=1e9, network_latency=1e-3, host_bandwidth=5e9, peak_known=False,
     source="one core of a current server, by order of magnitude (fp32 at half the peak): profile it")  # fmt: skip
