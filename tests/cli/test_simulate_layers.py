"""Stages given by layers on the command line, as in predictions of measured runs."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from measured.__main__ import row_of
from measured.commands import command_of
from measured.records import records
from typer.testing import CliRunner

from debubble.cli.app import with_all_commands
from debubble.ir import InputError
from debubble.planners.partitioning.by_layers import layers_named

NAMES = ("megatron_bridge_26_04/13",)
RECORDS = {record.name: record for record in records() if record.name in NAMES}


def simulated(command: str) -> Any:
    answer = CliRunner().invoke(with_all_commands(), shlex.split(command)[1:])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_run_prints_its_prediction(name: str) -> None:
    assert simulated(command_of(RECORDS[name]))["step_time"] == pytest.approx(row_of(RECORDS[name])["step"])


def test_layers_are_written_in_short() -> None:
    assert layers_named("15,2x16,1") == (15, 16, 16, 1)


@pytest.mark.parametrize("text", ["", "2x", "1,,2"])
def test_invalid_layer_lists_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="are no layers of stages; write them as 15,6x16,15"):
        layers_named(text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--schedule 1f1b --layers 8,8,8,7", "--layers has 31 layers on 4 stages; the model has 32"),
        ("--schedule interleaved --layers 8,8,8,8", "--layers has 4 stages, but 'interleaved' has 8 on 4 devices"),
        ("--schedule interleaved --layers 8x4 --chunks 3", "--chunks 3 makes 12 stages, but --layers has 8"),
        ("--schedule 1f1b --layers 4x8 --option recomputed_stages=2", "--option recomputed_stages says which stages"),
    ],
)
def test_options_that_contradict_the_layers_are_refused(options: str, reason: str) -> None:
    command = f"simulate llama3-8b --cluster 4xH100 {options}"
    error = CliRunner().invoke(with_all_commands(), command.split()).exception

    assert reason in str(error)


def test_slices_apply_to_explicit_layers() -> None:
    even = "debubble simulate llama3-8b --cluster 4xH100 --schedule seq1f1b --slices 4 --micro-batches 8 --json"
    answer, by_layers = simulated(even), simulated(f"{even} --layers 4x8")

    assert by_layers["operations"] == answer["operations"]
    assert by_layers["micro_batches"] == answer["micro_batches"]
