"""Records of measured runs, and the accuracies that they support."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from measured.__main__ import accuracies, row_of
from measured.commands import command_of
from measured.records import RUNS, Record, records

from debubble.costs import Cluster
from debubble.costs.accuracy import accuracy_of, stated_accuracies
from debubble.ir import InputError, RunOptions
from debubble.models import models
from debubble.models.architecture import MEASURED_FAMILIES
from debubble.models.mixers import Attention

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = {record.name: record for record in records()}


def test_there_are_150_measured_runs_60_with_memory() -> None:
    assert len(RECORDS) >= 150
    assert sum(record.memory is not None for record in RECORDS.values()) >= 60


def test_about_half_of_the_runs_are_for_testing() -> None:
    halves = Counter(record.half for record in RECORDS.values())

    assert abs(halves["fit"] - halves["test"]) < 0.15 * len(RECORDS)


def test_a_run_at_another_scale_and_release_is_in_the_same_half() -> None:
    record = RECORDS["megatron_bridge_26_06/06"]
    other = {**record.entries, "cluster": "2048xH100-80GB", "batch": 3072, "framework": "megatron-bridge@26.02"}

    assert Record("other", other).half == record.half


def test_every_file_of_runs_names_its_source() -> None:
    assert all(record.entries["source"] for record in RECORDS.values())
    assert len(list(RUNS.glob("*.toml"))) > 10


@pytest.mark.parametrize("name", [*RECORDS][::40])
def test_a_record_is_predicted(name: str) -> None:
    assert "refused" not in row_of(RECORDS[name])


def test_a_command_says_degrees_layers_and_framework() -> None:
    command = command_of(RECORDS["megatron_bridge_26_04/30"])

    assert command.startswith("debubble simulate qwen3-235b-a22b --cluster 256xB300-288GB --schedule 1f1b")
    assert "--framework megatron-bridge@26.04,dispatches_once=true" in command


def test_a_run_of_layers_that_differ_has_no_command() -> None:
    with pytest.raises(InputError, match="recompute differently"):
        command_of(RECORDS["torchtitan/00"])


def test_the_narrowest_group_with_runs_gives_the_interval() -> None:
    cluster = Cluster.parse("8xH100-80GB")
    stated = accuracy_of("step", models["llama3-8b"], cluster, RunOptions(dtype="fp8"))

    assert stated.group == "dense, Hopper, fp8"
    assert stated.scaled_to(2.0).high == pytest.approx(2 * stated.high)
    cpu = accuracy_of("step", models["llama3-8b"], Cluster.parse("2xCPU"), RunOptions())
    assert (cpu.group, cpu.of_hardware) == ("dense", False)
    mixed = accuracy_of("step", models["llama3-8b"], Cluster.parse("4xH100-80GB+4xA100-80GB"), RunOptions())
    assert not mixed.of_hardware
    other = accuracy_of("step", models["llama3-8b"], Cluster.parse("8xL40S-48GB"), RunOptions())
    assert other.group == "dense"  # None of it was measured on this hardware.


@pytest.mark.slow
def test_the_stated_accuracies_are_those_of_the_records() -> None:
    assert accuracies([row_of(record) for record in RECORDS.values()]) == stated_accuracies()


def test_families_with_measured_runs_are_named() -> None:
    notes = (DOCS / "notes" / "measured.md").read_text()
    measured = {name.removesuffix("-without-mtp") for name in re.findall(r"\| ([\w.-]+) on \d+x", notes)}
    priced = {model.family for name, model in models.items() if name in measured and model.whole_layers}
    mixed = {
        model.family
        for model in models.values()
        if model.whole_layers and not all(isinstance(layer.attention, Attention) for layer in model.per_layer)
    }

    assert priced & mixed == MEASURED_FAMILIES
