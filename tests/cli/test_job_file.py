"""Job files, which `init` and `import` write and which commands read instead of a MODEL."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from debubble.cli.job_file import JOB_COMMANDS
from tests.imports.test_megatron import SCRIPT

JOB = """
model = "llama-tiny"
cluster = "2xA100-80GB"
micro-batches = 4
sequence_length = 128
planner = "dapple"
pipeline = 2
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


def test_job_file_replaces_all_options(json_of: Any, job: Path) -> None:
    answer = json_of("plan", str(job))
    assert (answer["planner"], answer["micro_batches"], answer["devices"]) == ("dapple", 4, 2)


def test_options_of_the_command_line_override_a_job_file(json_of: Any, job: Path) -> None:
    answer = json_of("plan", "--micro-batches", "6", str(job), "--planner=merak")
    assert (answer["planner"], answer["micro_batches"], answer["devices"]) == ("merak", 6, 2)


def test_command_ignores_keys_of_other_commands(json_of: Any, job: Path) -> None:
    job.write_text(JOB + 'schedule = "gpipe"\n')
    assert json_of("simulate", str(job))["schedule"] == "gpipe"
    assert {row["degrees"]["pipeline"] for row in json_of("fits", str(job))["footprints"]} == {2}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (JOB + "global_btch = 2", "There is no entry 'global_btch'; did you mean 'global_batch'"),
        (JOB + "tensr = 2", "There is no entry 'tensr'; did you mean 'tensor'"),
        ('cluster = "2xL4"', 'has no model: write model = "llama3-8b"'),
        ("model = ", "is not TOML"),
        (JOB + "tensor = 0", "--tensor must be at least 1, not 0."),
        (JOB + "zero = 4", "job.toml: zero = 4: must be at most 3, not 4."),
        (JOB + 'tensor = "two"', 'job.toml: tensor must be a whole number, not "two".'),
        (JOB + 'tensor = "2"', 'job.toml: tensor must be a whole number, not "2".'),
        (JOB + "tensor = true", "job.toml: tensor must be a whole number, not true."),
        (JOB + "tensor = 2.0", "job.toml: tensor must be a whole number, not 2.0."),
        (JOB + "tensor = [2]", "job.toml: tensor must be a whole number, not [2]."),
        (JOB + "tensor = 2026-01-01", 'job.toml: tensor must be a whole number, not "2026-01-01".'),
        (JOB + 'host_optimizer = "0.5"', 'job.toml: host_optimizer must be a number, not "0.5".'),
        (JOB + 'schedule = "own.py:order"', "schedule names a file to run"),
        (JOB + "dtype = false", "job.toml: dtype must be a text, not false."),
        (JOB + 'dtype = "bf17"', "There is no dtype 'bf17'; did you mean 'bf16'"),
        (JOB + 'sequence-parallel = "yes"', 'job.toml: sequence-parallel must be true or false, not "yes".'),
    ],
)
def test_wrong_job_files_are_refused_with_a_sentence(run: Any, job: Path, text: str, sentence: str) -> None:
    job.write_text(text)
    for command in JOB_COMMANDS:
        varied = ("--over", "memory-limit=1GiB,2GiB") if command == "sweep" else ()
        code, _, err = run(command, str(job), *varied)
        assert (code, sentence in err) == (2, True)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ('option = "vector=1"', 'job.toml: option must be a list of texts, not "vector=1".'),
        ("csv = 3", "job.toml: csv must be a path, not 3."),
    ],
)
def test_simulate_refuses_mistyped_entries(run: Any, job: Path, entry: str, sentence: str) -> None:
    job.write_text(JOB + entry)
    code, _, err = run("simulate", str(job))
    assert (code, sentence in err) == (2, True)


def test_job_without_a_schedule_asks_for_one(run: Any, job: Path) -> None:
    code, _, err = run("simulate", str(job))
    assert (code, "Give the MODEL's schedule with --schedule NAME" in err) == (2, True)


def test_files_next_to_the_job_file_are_resolved(json_of: Any, job: Path) -> None:
    (job.parent / "nodes.yaml").write_text("devices: 1x2xA100-40GB\n")
    job.write_text(JOB.replace("2xA100-80GB", "nodes.yaml"))
    assert json_of("fits", str(job))["footprints"][0]["memory_limit"] == 0.9 * 40 * 2**30


def test_init_writes_a_job_that_is_read(run: Any, json_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    code, out, _ = run("init", str(file), "--model", "llama-tiny", "--cluster", "2xL4", "--sequence-length", "256")
    assert code == 0
    assert "debubble plan" in out
    assert tomllib.loads(file.read_text()) == {
        "model": "llama-tiny", "cluster": "2xL4", "global_batch": 64, "sequence_length": 256,
    }  # fmt: skip
    assert "# tensor = ..." in file.read_text()
    assert json_of("fits", str(file))["footprints"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "nope"), "There is no model or file 'nope'; see `debubble models`."),
        (("--cluster", "8xH101"), "There is no device 'H101'; did you mean 'H100-80GB'"),
    ],
)
def test_init_writes_no_job_that_plan_refuses(
    run: Any, tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("init", str(tmp_path / "new.toml"), *options)
    assert (code, sentence in err) == (2, True)
    assert not (tmp_path / "new.toml").exists()


def test_init_overwrites_nothing(run: Any, job: Path) -> None:
    code, _, err = run("init", str(job))
    assert code == 2
    assert "is there already" in err
    assert job.read_text() == JOB


def test_import_writes_the_job_as_it_is(run: Any, json_of: Any, tmp_path: Path) -> None:
    script, file = tmp_path / "job.sh", tmp_path / "job.toml"
    script.write_text(SCRIPT.replace("EXTRA", ""))
    code, _, err = run(
        "import", "megatron", str(script), "--cluster", "4xA100-80GB", "--as-it-is", "-o", str(file)
    )  # fmt: skip
    assert code == 0
    assert "debubble plan" in err
    job = tomllib.loads(file.read_text())
    answer = json_of("fits", str(file))["footprints"]
    assert len(answer) == 1
    assert {name: answer[0]["degrees"][name] for name in ("pipeline", "tensor", "data", "zero")} == {
        name: job[name] for name in ("pipeline", "tensor", "data", "zero")
    }
    assert json.loads((tmp_path / job["model"]).read_text())["model_type"]
