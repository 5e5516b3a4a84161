"""`debubble sweep` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY = ("sweep", "llama-tiny", "--cluster", "2xA100-80GB", "--planner", "dapple")


def test_a_sweep_prints_a_row_for_every_value(run: Any) -> None:
    code, out, _ = run(*TINY, "--micro-batches", "4", "--over", "memory-limit=10MiB,1GiB")

    assert code == 0
    rows = [line.split() for line in out.splitlines() if "iB " in line]
    assert rows[0] == ["10MiB", "does", "not", "fit"]
    assert rows[1][:3] == ["1GiB", "18.04", "ms"]


def test_a_sweep_in_which_nothing_fits_ends_with_exit_1(run: Any) -> None:
    code, out, _ = run(*TINY, "--micro-batches", "4", "--over", "memory-limit=1MiB,2MiB")

    assert code == 1
    assert [line.partition(":")[0] for line in out.splitlines() if ": " in line] == ["1MiB", "2MiB"]


def test_sweep_reports_the_value_it_plans(run: Any) -> None:
    _, _, progress = run(*TINY, "--over", "micro-batches=2,4")

    assert progress.splitlines() == ["micro-batches 2: planning ...", "micro-batches 4: planning ..."]


def test_json_has_the_figures_of_every_value(run: Any, tmp_path: Path) -> None:
    _, out, _ = run(*TINY, "--over", "micro-batches=2,4", "--json", "--html", str(tmp_path / "page.html"))
    answer = json.loads(out)
    assert [(point["levers"], point["host_memory"]) for point in answer["points"]] == [(["pipeline 2"], [0.0, 0.0])] * 2
    assert "megatron" in answer["points"][0]["runs_in"]

    assert answer["over"] == "micro_batches"
    assert [(point["value"], point["schedule"]) for point in answer["points"]] == [("2", "1f1b"), ("4", "1f1b")]
    assert all(point["step_low"] < point["step_time"] < point["step_high"] for point in answer["points"])
    assert "slider" in (tmp_path / "page.html").read_text()


def test_a_sweep_draws_its_steps(run: Any, tmp_path: Path) -> None:
    run(*TINY, "--over", "micro-batches=2,4", "--svg", str(tmp_path / "steps.svg"))

    assert "seconds per step" in (tmp_path / "steps.svg").read_text()


def test_a_sweep_takes_a_job_file(json_of: Any, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('model = "llama-tiny"\ncluster = "2xA100-80GB"\nmicro_batches = 4\n')
    answer = json_of("sweep", str(tmp_path / "job.toml"), "--planner", "dapple", "--over", "memory-limit=1GiB,2GiB")

    assert [point["value"] for point in answer["points"]] == ["1GiB", "2GiB"]


@pytest.mark.parametrize(
    "over", ["micro-batches=2,8", "micro_batches=2,8", "cluster=2xL4,4xL4", "model=llama-tiny,gpt2-tiny"]
)
def test_over_option_overrides_the_job_file(json_of: Any, tmp_path: Path, over: str) -> None:
    entries = 'model = "llama-tiny"\ncluster = "2xA100-80GB"\nmicro_batches = 4\nsequence_length = 256\n'
    (tmp_path / "job.toml").write_text(entries)
    answer = json_of("sweep", str(tmp_path / "job.toml"), "--planner", "dapple", "--over", over)

    assert [point["value"] for point in answer["points"]] == over.partition("=")[2].split(",")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("colour=red,blue", "--over varies one of model, cluster, memory-limit"),
        ("tensor=1", "--over takes two values or more"),
        ("tensor=1,two", "takes whole numbers, 0 or more, not 'two'"),
        ("tensor=1,2 --tensor 1", "--over has the values of --tensor: leave out --tensor"),
        ("cluster=2xL4,4xL4", "leave out --cluster"),
    ],
)
def test_invalid_sweeps_are_refused(run: Any, options: str, message: str) -> None:
    code, _, error = run(*TINY, "--over", *options.split())

    assert code == 2
    assert message in error
