"""A cluster: its devices, their links, and how much of their memory a plan may use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import yaml

from debubble import __version__
from debubble.costs.calibration import MeasuredRun, check_run
from debubble.costs.devices.known_hardware import (
    NETWORK_LATENCY,
    OTHER,
    PCIE4,
    PCIE_LATENCY,
    Hardware,
    Table,
    find_hardware,
)
from debubble.files import convert, parse, read_file, write_json, write_whole
from debubble.ir import InputError
from debubble.ir.stage_costs import LARGEST
from debubble.pickling import PickledFields

SAFETY_MARGIN = 0.1
"""Fraction of a device's memory reserved for the framework, communication buffers and fragmentation.

Published runs reserve 3-9% more than they allocate, and those above 72 of 80 GiB tend to run out of memory.
"""

FRAGMENTATION = 0.06
"""Fraction of its peak that a plan reserves for fragmentation of torch's allocator where all other overheads are
measured: the middle of the 3-9% that published runs reserve, twice what an arena needs (notes/addresses.md)."""

CLOCK_EXPONENT = 1 / 3
"""Clocks scale with power to this exponent: power is frequency times voltage squared, and voltage follows frequency."""

RELATIVE_EFFICIENCIES = ("fp8", "mxfp8", "nvfp4", "flash_2")
"""Efficiencies that are relative to another one, and may be above 1."""
MAX_RELATIVE_EFFICIENCY = 4.0


class EfficiencyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Efficiencies that replace the hardware's own; tables are lists of [size, fraction of the peak]."""

    matmul: tuple[tuple[float, float], ...] | None = None
    attention: tuple[tuple[float, float], ...] | None = None
    attention_backward: tuple[tuple[float, float], ...] | None = None
    memory: float | None = None
    fp8: float | None = None
    mxfp8: float | None = None
    nvfp4: float | None = None
    flash_2: float | None = None
    grouped_weight: float | None = None
    permute: float | None = None
    link: float | None = None
    network: float | None = None
    host: float | None = None
    launch: float | None = None


class DeviceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A user-defined type of device in a cluster file; links are by default those of a PCIe 4 card."""

    memory: int | float | str
    flops: float
    memory_bandwidth: float
    fp8_flops: float = 0.0
    fp4_flops: float = 0.0
    power: float = 0.0
    bf16: bool = True
    link_bandwidth: float = PCIE4
    link_latency: float = PCIE_LATENCY
    network_bandwidth: float = 12.5e9
    network_latency: float = NETWORK_LATENCY
    host_bandwidth: float = PCIE4
    host_link: str = "full-duplex"
    host_memory: int | float | str = 0
    devices_per_node: int = 8
    devices_per_switch: int = 1


class ClusterFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A cluster file, field by field.  Bandwidths are bytes per second and direction of one device."""

    devices: str
    devices_per_node: int | None = None
    devices_per_switch: int | None = None
    link_bandwidth: float | None = None
    link_latency: float | None = None
    network_bandwidth: float | None = None
    network_latency: float | None = None
    host_bandwidth: float | None = None
    host_link: str | None = None
    host_memory: int | float | str | None = None
    flops: float | None = None
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    power: float | None = None
    memory_bandwidth: float | None = None
    memory_limit: int | float | str | list[int | float | str] | None = None
    safety_margin: float = SAFETY_MARGIN
    efficiency: EfficiencyFile = EfficiencyFile()
    hardware: dict[str, DeviceFile] = {}
    calibration: tuple[MeasuredRun, ...] = ()


NON_GPU_PREFIXES = ("CPU", "TPU", "Ascend")
"""Name prefixes of devices that are not GPUs."""
YAML_SUFFIXES = (".yaml", ".yml")
MAX_DEVICES = 1_000_000
"""Maximum devices of a cluster."""
MIN_VALUE = 1e-12
"""Lower limit of rates, latencies and efficiencies; dividing by it does not overflow."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Cluster(PickledFields):
    """Devices in rank order.  Computing is priced by the type of each, communication by the slowest type."""

    types: tuple[Hardware, ...]
    """The type of every device."""
    memory_limits: tuple[int, ...]
    """Bytes of every device that a plan may use."""
    file: Mapping[str, Any]
    """The content of its cluster file."""
    calibration: tuple[MeasuredRun, ...] = ()
    """Measured runs that correct predictions."""

    @staticmethod
    def of(cluster: Cluster | str | Path) -> Cluster:
        """The cluster itself, or the one that a text or a file describes.

        Raises:
            InputError: If it is neither.
        """
        if isinstance(cluster, str | Path):
            return Cluster.parse(cluster)
        if not isinstance(cluster, Cluster):
            raise InputError(f"A cluster is a db.Cluster, a text such as '8xA100-80GB' or a file, not {cluster!r}.")
        return cluster

    @staticmethod
    def parse(text: str | Path) -> Cluster:
        """Read `8xA100-80GB`, nodes such as `2x4xL40S`, a mixture such as `4xA100-80GB+4xA100-40GB`, or a YAML file.

        Args:
            text: Devices, nodes x devices per node, or a file name.

        Raises:
            InputError: If the text or the file is malformed.
        """
        name = str(text)
        if Path(name).suffix in (*YAML_SUFFIXES, ".json"):
            entries = _read(Path(name))
            try:
                return Cluster.from_dict(entries)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
        return Cluster.from_dict({"devices": name})

    @staticmethod
    def from_dict(entries: Any) -> Cluster:
        """Build a cluster from a cluster file's content."""
        try:
            # Not strict: YAML parses 5e9 as a string.
            file = convert(entries, ClusterFile, strict=False)
        except msgspec.ValidationError as error:
            raise InputError(f"The cluster is wrong: {error}{_legal_fields(str(error))}.") from error
        nodes = re.fullmatch(r"\s*(\d{1,7})\s*x\s*([1-9]\d{0,6})\s*x\s*(?!\d+x)([^\s+]+)\s*", file.devices)
        if nodes is not None:
            per_node = int(nodes[2])
            file.devices_per_node = file.devices_per_node or per_node
            file.devices = f"{int(nodes[1]) * per_node}x{nodes[3]}"
        named = _types(file.devices, {name: _user_hardware(name, device) for name, device in file.hardware.items()})
        types = tuple(type_ for count, named_type in named for type_ in [_with_overrides(named_type, file)] * count)
        # A plan has the full names of its devices: a shorter name may become ambiguous.
        file.devices = "+".join(f"{len(list(run))}x{name}" for name, run in groupby(t.name for t in types))
        if not 0 <= file.safety_margin < 1:
            raise InputError(f"safety_margin must be at least 0 and below 1, not {file.safety_margin}.")
        if file.memory_limit is None:
            limits = tuple(int(t.memory * (1 - file.safety_margin)) for t in types)
        else:
            sizes = file.memory_limit if isinstance(file.memory_limit, list) else [file.memory_limit] * len(types)
            if len(sizes) != len(types):
                raise InputError(f"memory_limit lists {len(sizes)} sizes for {len(types)} devices.")
            limits = tuple(_limit(size, type_) for size, type_ in zip(sizes, types, strict=True))
        for run in file.calibration:
            check_run(run)
        entries = msgspec.to_builtins(file)
        return Cluster(types=types, memory_limits=limits, file=entries, calibration=file.calibration)

    def to_dict(self) -> dict[str, Any]:
        """The cluster file's content."""
        return dict(self.file)

    def __repr__(self) -> str:
        """The call that builds it: shorter than all fields of all devices."""
        return f"Cluster.from_dict({self.to_dict()!r})"

    def gives(self, entry: str) -> bool:
        """True if the cluster file has an entry such as `link_bandwidth`, or describes its devices itself."""
        return self.file.get(entry) is not None or self.slowest.name in (self.file.get("hardware") or {})

    def save(self, path: Path, *, notes: Sequence[str] = ()) -> None:
        """Write the cluster file atomically.

        Args:
            path: Its name, which ends in .yaml, .yml or .json.
            notes: Comments at the top of a YAML file; JSON has none.

        Raises:
            InputError: If the suffix is another one, or the file cannot be written.
        """
        if path.suffix == ".json":
            write_json(path, self.to_dict())
            return
        if path.suffix not in YAML_SUFFIXES:
            raise InputError(f"{path} is no name of a cluster file: it ends in .yaml, .yml or .json.")
        comments = "".join(f"# {note}\n" for note in notes)
        write_whole(path, (comments + yaml.safe_dump(self.to_dict(), sort_keys=False)).encode())

    def with_limit(self, memory_limit: int | float | str) -> Cluster:
        """A copy with this memory limit for every device."""
        return Cluster.from_dict({**self.file, "memory_limit": memory_limit})

    def in_reverse(self) -> Cluster | None:
        """A copy with the devices in reverse order; None if that is the same, or there is a memory limit per device."""
        if self.types == self.types[::-1] or isinstance(self.file.get("memory_limit"), list):
            return None
        named = "+".join(reversed(self.file["devices"].split("+")))
        return Cluster.from_dict({**self.file, "devices": named})

    def with_measured_reserve(self, unplanned: int) -> Cluster:
        """A copy whose memory limit reserves a profile's unplanned bytes, and a fraction for fragmentation.

        Returns the cluster itself if its file sets a memory limit or a safety margin.

        Args:
            unplanned: Bytes of a device that no plan counts, as a profile measures them.

        Raises:
            InputError: If nothing remains for a plan.
        """
        if self.file.get("memory_limit") is not None or "safety_margin" in self.file:
            return self
        limits = [int((type_.memory - unplanned) / (1 + FRAGMENTATION)) for type_ in self.types]
        if min(limits) < 1:
            raise InputError(f"The profile measured {unplanned} bytes besides the plan's, more than a device has.")
        return Cluster.from_dict({**self.file, "memory_limit": limits[0] if self.is_homogeneous else limits})

    def with_count(self, count: int) -> Cluster | None:
        """A copy with `count` devices; None if they are of several types, or there is a memory limit per device."""
        names = {type_.name for type_ in self.types}
        if len(names) > 1 or isinstance(self.file.get("memory_limit"), list):
            return None
        return Cluster.from_dict({**self.file, "devices": f"{count}x{names.pop()}"})

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.types)

    @cached_property
    def slowest(self) -> Hardware:
        """The type with the lowest peak, which sets the speed of collective operations."""
        return slowest(self.types)

    @cached_property
    def is_homogeneous(self) -> bool:
        """True if all devices are of one type."""
        return len({type_.name for type_ in self.types}) == 1

    @property
    def device_word(self) -> str:
        """The word for one of the devices: `GPU`, or `device` if some are known not to be GPUs."""
        return "device" if any(type_.name.startswith(NON_GPU_PREFIXES) for type_ in self.types) else "GPU"

    @property
    def reserve(self) -> int:
        """Bytes of a device that no plan may use: the minimum over all devices."""
        return max(0, min(t.memory - limit for t, limit in zip(self.types, self.memory_limits, strict=True)))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on devices of several types, on a limit above a device's memory, and on an old calibration."""
        sentences = []
        names = list(dict.fromkeys(t.name for t in self.types))
        if len(names) > 1:
            sentences.append(
                f"{' and '.join(names)} are mixed: a pipeline device has the pace of its slowest and the memory limit"
                f" of its smallest device; links, and gradients and optimizer after the pipeline, are timed as on"
                f" {self.slowest.name}."
            )
        for type_, limit in zip(self.types, self.memory_limits, strict=True):
            if limit > type_.memory:
                sentences.append(
                    f"The memory limit of {limit / 2**30:.4g} GiB is more than the {type_.memory / 2**30:.4g} GiB that"
                    f" {type_.name} has, so that a plan may run out of memory."
                )
                break
        if any(run.version != __version__ for run in self.calibration):
            sentences.append("The calibration is of another version's predictions: run `debubble calibrate` again.")
        return tuple(sentences)


def _legal_fields(error: str) -> str:
    """A hint to append to the message on a field: the fields that exist, or the unit of a number."""
    if "unknown field" in error:
        section: type[msgspec.Struct] = ClusterFile
        section = EfficiencyFile if "`efficiency" in error else DeviceFile if "`hardware" in error else section
        return f"; the fields are {', '.join(section.__struct_fields__)}"
    if "bandwidth`" in error:
        return (
            "; a bandwidth is a number of bytes per second of one device: four devices that share 100 Gb/s have 3.125e9"
        )
    return ""


def slowest(types: Sequence[Hardware]) -> Hardware:
    """The type with the lowest peak."""
    return min(types, key=lambda type_: (type_.flops, type_.memory_bandwidth))


def _limit(size: int | float | str, device: Hardware) -> int:
    """Bytes of a memory limit, which may be a fraction of the device's memory such as `70%`."""
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", size) if isinstance(size, str) else None
    return parse_size(size if share is None else device.memory * float(share[1]) / 100)


def parse_size(size: int | float | str, name: str = "A memory limit") -> int:
    """Bytes of a number, or of a text such as `72GiB` or `80GB`; `name` is for error messages."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", size)
        if match is None:
            raise InputError(f"'{size}' is no size; write bytes as a number, or a text such as 72GiB or 80GB.")
        if match[2] is None and 1 <= float(match[1]) < _SCALES["KB"]:
            raise InputError(f"A memory of {match[1]} bytes holds nothing; give a unit, such as {match[1]}GiB.")
        return parse_size(float(match[1]) * _SCALES[match[2] or "B"], name)
    if 0 < size < 1:
        raise InputError(
            f"{name} of {size:g} bytes holds nothing; give a unit, such as 72GiB, or of a device a share, such as"
            f" {100 * size:g}%."
        )
    if not 1 <= size <= LARGEST:
        raise InputError(f"{name} must be positive and at most {LARGEST:.0e} bytes, not {size}.")
    return int(size)


_SCALES = {"B": 1} | {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")} | {
    f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")
}  # fmt: skip


def _user_hardware(name: str, device: DeviceFile) -> Hardware:
    """The hardware that a user describes in a cluster file."""
    entries = msgspec.structs.asdict(device)
    memory, host = parse_size(device.memory), parse_size(device.host_memory) if device.host_memory else 0
    for entry, value in entries.items():
        if entry not in ("bf16", "host_link", "memory", "host_memory", *_OPTIONAL_RATES):
            _check_rate(entry, value)
    for entry in _OPTIONAL_RATES:
        if entries[entry]:
            _check_rate(entry, entries[entry])
    _check_duplex(device.host_link)
    return Hardware(
        **{**entries, "memory": memory, "host_memory": host}, name=name, efficiency=OTHER, source="the cluster file"
    )


_OPTIONAL_RATES = ("fp8_flops", "fp4_flops", "power")
"""Rates that may be 0: the device does not support it, or the vendor does not state it."""


MIN_RATE = 1e6
"""Operations or bytes per second below which an entry must be in another unit, TFLOP/s or GB/s."""


def _check_rate(name: str, value: float) -> None:
    for ending, power, unit in (("flops", 12, "TFLOP/s"), ("bandwidth", 9, "GB/s")):
        if name.endswith(ending) and MIN_VALUE <= value < MIN_RATE:
            raise InputError(f"{name} is {value:g} per second: write {value:g}e{power} for {value:g} {unit}.")
    if not MIN_VALUE <= value <= LARGEST:
        raise InputError(f"{name} must be positive and at most {LARGEST:.0e}, not {value}.")


def _check_duplex(link: str) -> None:
    if link not in ("full-duplex", "half-duplex"):
        raise InputError(f"host_link is '{link}'; it must be full-duplex or half-duplex.")


def _types(text: str, user_hardware: Mapping[str, Hardware]) -> list[tuple[int, Hardware]]:
    """Parse `NxNAME+NxNAME` to the number of devices of each type, in order."""
    types: list[tuple[int, Hardware]] = []
    total = 0
    for group in text.split("+"):
        match = re.fullmatch(r"\s*(\d+)\s*x\s*(?!\d+x)(\S+)\s*", group)
        if match is None:
            raise InputError(
                f"'{text}' is no cluster; write NxNAME, such as 8xA100-80GB, NODESxNxNAME, such as 2x4xL40S-48GB, or"
                " name a YAML file."
            )
        if len(match[1]) > len(str(MAX_DEVICES)) or total + int(match[1]) > MAX_DEVICES:
            raise InputError(f"A cluster may have up to {MAX_DEVICES} devices.")
        if not int(match[1]):
            raise InputError("A cluster needs at least one device.")
        name, count = match[2], int(match[1])
        types.append((count, user_hardware[name] if name in user_hardware else find_hardware(name)))
        total += count
    return types


def _with_overrides(type_: Hardware, file: ClusterFile) -> Hardware:
    """The hardware with a cluster file's entries in place of the datasheet's, and its efficiencies in place of ours."""
    names = {f.name for f in dataclasses.fields(Hardware)} - {"efficiency"}
    changes = {k: v for k, v in msgspec.structs.asdict(file).items() if k in names and v is not None}
    shares = {k: v for k, v in msgspec.structs.asdict(file.efficiency).items() if v is not None}
    _check_duplex(changes.get("host_link", "full-duplex"))
    if "host_memory" in changes:
        changes["host_memory"] = parse_size(changes["host_memory"])
    for name, value in changes.items():
        if name != "host_link":
            _check_rate(name, value)
    for name, value in shares.items():
        _check_share(name, value)
    reached = dataclasses.replace(type_.efficiency, **shares)
    if file.power is not None:
        if not type_.power:
            raise InputError(f"power is given for {type_.name}, whose own is not known: give efficiencies instead.")
        reached = reached.at_clock((file.power / type_.power) ** CLOCK_EXPONENT)
    return dataclasses.replace(type_, **changes, efficiency=reached)


def _check_share(name: str, value: float | Table) -> None:
    """Check an efficiency, or a table of them by ascending size; `launch` is a time."""
    sizes = [size for size, _ in value] if isinstance(value, tuple) else [1.0]
    values = [share for _, share in value] if isinstance(value, tuple) else [value]
    if not sizes or sizes != sorted(set(sizes)) or not all(MIN_VALUE <= size <= LARGEST for size in sizes):
        raise InputError(f"{name} must be a list of [size, share] with positive, ascending sizes, not {value}.")
    if name in RELATIVE_EFFICIENCIES and not all(MIN_VALUE <= share <= MAX_RELATIVE_EFFICIENCY for share in values):
        raise InputError(
            f"{name} must be positive and at most {MAX_RELATIVE_EFFICIENCY}, not {value}: bf16's share is its unit."
        )
    if name not in ("launch", *RELATIVE_EFFICIENCIES) and not all(MIN_VALUE <= share <= 1 for share in values):
        raise InputError(f"{name} must be positive and at most 1, the whole peak, not {value}.")
    if name == "launch" and not MIN_VALUE <= values[0] <= LARGEST:
        raise InputError(f"launch must be positive and at most {LARGEST:.0e} seconds, not {value}.")


def _read(path: Path) -> Any:
    content = read_file(path, "cluster file")
    # PyYAML does not catch the exceptions of its date and number constructors.
    entries = parse(yaml.safe_load, content, f"The cluster file {path} is not YAML", yaml.YAMLError, AttributeError)
    if entries is None:
        raise InputError(f"The cluster file {path} is empty: write at least its devices, as `devices: 8xA100-80GB`.")
    return entries
