"""Clusters: the short form, the file, and what a plan may use of the memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from debubble.costs import Cluster, hardware, parse_size
from debubble.ir import InputError

GIB = 2**30
MINE = {"memory": "96GiB", "flops": 4e14, "memory_bandwidth": 3e12}
"""A device that only a cluster file describes."""


@pytest.mark.parametrize(
    ("text", "name"), [("4xL40S", "L40S-48GB"), ("64xH100", "H100-80GB"), ("2xh100-pcie", "H100-PCIe-80GB")]
)
def test_an_unambiguous_short_name_is_accepted(text: str, name: str) -> None:
    """A device whose name differs only by its memory size comes first."""
    cluster = Cluster.parse(text)

    assert cluster.slowest.name == name
    assert cluster.to_dict()["devices"] == f"{cluster.count}x{name}"


def test_nodes_are_written_in_front_of_their_devices() -> None:
    cluster = Cluster.parse("2x4xL40S")

    assert (cluster.count, cluster.slowest.name, cluster.slowest.devices_per_node) == (8, "L40S-48GB", 4)
    assert Cluster.from_dict(cluster.to_dict()) == cluster == Cluster.from_dict({"devices": "2x4xL40S"})


def test_the_repr_of_a_cluster_is_the_call_that_makes_it() -> None:
    assert repr(Cluster.parse("4xL40S")) == "Cluster.from_dict({'devices': '4xL40S-48GB'})"


@pytest.mark.parametrize("text", ["2x0xL40S", "2x4xL40S+4xL40S", "2x4x"])
def test_nodes_of_something_else_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"'{text}' is no cluster; write NxNAME")):
        Cluster.parse(text)


def test_a_limit_above_a_devices_memory_has_a_remark() -> None:
    cluster = Cluster.parse("4xA100-40GB").with_limit("48GiB")

    assert cluster.reserve == 0
    assert cluster.remarks == (
        "The memory limit of 48 GiB is more than the 40 GiB that A100-40GB has, so that a plan may run out of memory.",
    )


def test_a_file_may_describe_custom_devices() -> None:
    cluster = Cluster.from_dict({"devices": "4xMine+4xL40S", "hardware": {"Mine": {**MINE, "fp8_flops": 8e14}}})
    custom = cluster.types[0]

    assert (custom.memory, custom.flops, custom.fp8_flops, custom.memory_bandwidth) == (96 * GIB, 4e14, 8e14, 3e12)
    assert custom.source == "the cluster file"
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_a_tenth_of_the_memory_is_reserved_by_default() -> None:
    cluster = Cluster.parse("8xA100-80GB")

    assert (cluster.count, cluster.slowest.name) == (8, "A100-80GB")
    assert cluster.memory_limits == (72 * GIB,) * 8
    mixture = Cluster.parse("2xH100-80GB+1xA100-40GB")
    assert (mixture.memory_limits, mixture.slowest.name) == ((72 * GIB, 72 * GIB, 36 * GIB), "A100-40GB")


def test_a_measured_reserve_replaces_the_default() -> None:
    cluster = Cluster.parse("8xA100-80GB").with_measured_reserve(2 * GIB)

    assert cluster.memory_limits == (int(78 * GIB / 1.06),) * 8
    assert cluster.reserve == 80 * GIB - int(78 * GIB / 1.06)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize("stated", [{"memory_limit": "70GiB"}, {"safety_margin": 0.2}])
def test_a_measured_reserve_replaces_no_stated_limit(stated: dict[str, Any]) -> None:
    cluster = Cluster.from_dict({"devices": "8xA100-80GB", **stated})

    assert cluster.with_measured_reserve(2 * GIB) == cluster


def test_a_reserve_of_the_full_memory_is_refused() -> None:
    with pytest.raises(InputError, match=f"The profile measured {80 * GIB} bytes besides the plan's"):
        Cluster.parse("8xA100-80GB").with_measured_reserve(80 * GIB)


def test_a_file_overrides_links_and_efficiencies(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "devices: 4xL40S-48GB\nnetwork_bandwidth: 5e9\nsafety_margin: 0.2\nhost_link: half-duplex\n"
        "efficiency:\n  memory: 0.5\n  matmul: [[128, 0.1], [4096, 0.5]]\n"
    )
    device = Cluster.parse(file).slowest

    assert device.network_bandwidth == 5e9
    assert device.host_link == "half-duplex"
    assert device.efficiency.memory == 0.5
    assert device.efficiency.matmul == ((128, 0.1), (4096, 0.5))
    assert device.efficiency.link == hardware["L40S-48GB"].efficiency.link
    assert Cluster.parse(file).memory_limits == (36 * GIB,) * 4


def test_memory_limits_are_for_all_devices_or_per_device() -> None:
    assert Cluster.from_dict({"devices": "2xCPU", "memory_limit": "1.5GiB"}).memory_limits == (3 * GIB // 2,) * 2
    assert Cluster.from_dict({"devices": "2xCPU", "memory_limit": [100, "2KB"]}).memory_limits == (100, 2000)
    assert Cluster.parse("2xCPU").with_limit("1GiB").memory_limits == (GIB, GIB)
    assert Cluster.parse("1xA100-80GB+1xA100-40GB").with_limit("70%").memory_limits == (56 * GIB, 28 * GIB)


@pytest.mark.parametrize(
    ("text", "size"), [("72GiB", 72 * GIB), ("80GB", 80 * 10**9), ("2000", 2000), (7.5, 7), ("1.5 MiB", 3 * 2**19)]
)
def test_sizes_are_read_with_their_units(text: float | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"devices": "A100-80GB"}, "'A100-80GB' is no cluster; write NxNAME"),
        ({"devices": "0xCPU"}, "at least one device"),
        ({"devices": "8xA100-81GB"}, "There is no device 'A100-81GB'; did you mean 'A100-80GB' or"),
        ({"devices": "2xA100-80GB", "flops": 200}, "flops is 200 per second: write 200e12 for 200 TFLOP/s"),
        ({"devices": "2xRTX4091"}, "There is no device 'RTX4091'; did you mean 'RTX4090-24GB'"),
        ({"devices": "8xSpock"}, "There is no device 'Spock'; see `debubble hardware`"),
        ({"devices": "8xA100"}, "'A100' may be A100-40GB or A100-80GB: write more of it."),
        (
            {"devices": "2xX", "hardware": {"X": {"memory": "1GiB", "flops": 1e12}}},
            "`hardware[...]` has no field `memory_bandwidth`",
        ),
        ({"devices": "2xX", "hardware": {"X": {**MINE, "memory": "much"}}}, "'much' is no size"),
        (
            {"devices": "2xX", "hardware": {"X": {**MINE, "host_link": "simplex"}}},
            "must be full-duplex or half-duplex",
        ),
        ({"devices": "2xCPU", "safety_margin": 1}, "safety_margin must be at least 0 and below 1"),
        ({"devices": "2xCPU", "memory_limit": [1]}, "memory_limit lists 1 sizes for 2 devices"),
        ({"devices": "2xCPU", "memory_limit": 0}, "must be positive"),
        ({"devices": "2xCPU", "memory_limit": "30"}, "A memory of 30 bytes holds nothing; give a unit, such as 30GiB."),
        ({"devices": "2xCPU", "efficiency": {"matmul": []}}, "matmul"),
        ({"devices": "2xCPU", "link_bandwidth": float("inf")}, "link_bandwidth must be positive and at most 1e+18"),
        ({"devices": "2xCPU", "link_latency": float("nan")}, "link_latency must be positive"),
        ({"devices": "2xCPU", "memory_limit": 10**400}, "A memory limit must be positive and at most 1e+18"),
        ({"devices": "9999999999xCPU"}, "A cluster may have up to 1000000 devices"),
        ({"devices": "2xCPU", "efficiency": {"memory": 5}}, "memory must be positive and at most 1, the whole peak"),
        ({"devices": "2xCPU", "efficiency": {"matmul": [[8, 0.1], [8, 0.2]]}}, "with positive, ascending sizes"),
        ([], "cluster is wrong"),
        ({"device": "A100-40GB"}, "unknown field `device`; the fields are devices, devices_per_node"),
        ({"devices": "2xL4", "efficiency": {"matmull": 1}}, "the fields are matmul, attention, attention_backward"),
        ({"devices": "2xMine", "hardware": {"Mine": {**MINE, "ram": 1}}}, "the fields are memory, flops"),
        ({"devices": "2xL4", "network_bandwidth": "100Gb/s"}, "bytes per second of one device"),
        ({"devices": "8xGTX1080"}, "A cluster file describes any other under `hardware`"),
    ],
)
def test_an_invalid_cluster_is_refused(entries: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        Cluster.from_dict(entries)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("devices: [", "is not YAML"),
        ("devices: 2020-99-99", "is not YAML"),
        ("a: " + "9" * 5000, "is not YAML"),
        ("[" * 600, "is nested too deeply"),
    ],
)
def test_an_invalid_cluster_file_is_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)

    with pytest.raises(InputError, match=sentence):
        Cluster.parse(tmp_path / "c.yaml")


def test_every_device_has_a_source_and_positive_rates() -> None:
    for device in hardware.values():
        assert device.source
        assert min(device.flops, device.memory_bandwidth, device.link_bandwidth, device.network_bandwidth) > 0


def test_devices_cite_the_page_of_their_manufacturer() -> None:
    without = {name for name, device in hardware.items() if not device.url.startswith("https://")}
    assert without == {"A800-80GB", "A800-PCIe-80GB", "H800-80GB", "H20-96GB", "Ascend-910-64GB", "CPU"}
