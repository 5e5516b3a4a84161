"""`debubble calibrate` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import debubble as db
from debubble.cli.answers import ANSWERS
from debubble.costs.calibration import error_shares
from debubble.planners.plan_step import seconds_per_step
from tests.views.scenes import small_plan

STEP = error_shares()["step"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> db.Plan:
    """A plan of a tiny model, in plan.json of the working folder."""
    monkeypatch.chdir(tmp_path)
    made = db.plan(db.models["llama-tiny"], db.Cluster.parse("2xA100-80GB"), micro_batches=4, planner="dapple")
    made.save("plan.json")
    return made


def slower(plan: db.Plan, times: float) -> str:
    return str(times * seconds_per_step(plan))


def test_calibrate_prints_old_and_new_prediction(run: Any, plan: db.Plan) -> None:
    code, out, error = run("calibrate", "plan.json", "--step", slower(plan, 1.1))

    assert code == 0
    words = " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert words.startswith("Step: predicted ")
    assert "(1.100 times)" in words
    assert (
        f"The run moves the step of its own job by {100 * STEP.of_job:.0f}% of the difference, and that of other jobs"
    ) in words
    several = 3 * STEP.of_model / (1 + 2 * STEP.of_model)
    assert f"by {100 * STEP.of_model:.0f}% (3 such runs by {100 * several:.0f}%)" in words
    assert words.endswith("other dense models in bf16, on A100-80GB with no --framework.")
    assert "give it with --cluster cluster.yaml" in error


def test_interval_comes_from_other_runs(run: Any, plan: db.Plan) -> None:
    _, out, _ = run("calibrate", "plan.json", "--step", slower(plan, 1.6))

    assert "and other runs of the job " in " ".join(out.split())


@pytest.mark.parametrize(("times", "doubted"), [(1.05, False), (2.5, True)])
def test_a_run_outside_all_intervals_is_doubted(run: Any, plan: db.Plan, times: float, doubted: bool) -> None:
    _, out, _ = run("calibrate", "plan.json", "--step", slower(plan, times))

    assert ("check that the run has this plan's model" in " ".join(out.split())) is doubted


def test_a_log_of_the_run_gives_step_and_memory(json_of: Any, plan: db.Plan) -> None:
    milliseconds = 1.2e3 * seconds_per_step(plan)
    Path("log.txt").write_text(f"elapsed time per iteration (ms): {milliseconds} | max allocated: 1024.0 |")

    answer = json_of("calibrate", "plan.json", "log.txt")

    assert json.loads(msgspec.json.encode(msgspec.convert(answer, ANSWERS["calibrate"]))) == answer
    figures = answer["figures"]
    assert figures["step"]["ratio"] == pytest.approx(1.2)
    assert figures["memory"]["measured"] == 2**30


def test_a_step_beyond_the_devices_peak_is_refused(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = db.plan(db.models["llama3-8b"], db.Cluster.parse("4xA100-80GB"), micro_batches=8, planner="dapple")
    made.save("plan.json")
    code, _, error = run("calibrate", "plan.json", "--step", slower(made, 0.2))

    assert code == 2
    assert "% of the devices' peak FLOPs: check that the plan" in " ".join(error.split())


def test_cluster_file_has_the_run_and_notes(run: Any, plan: db.Plan) -> None:
    run("calibrate", "plan.json", "--step", slower(plan, 1.1), "--memory", "1GiB")
    text = Path("cluster.yaml").read_text()

    assert text.startswith("# Written by `debubble calibrate`.\n# Step: predicted")
    (measured,) = yaml.safe_load(text)["calibration"]
    assert measured["run"] == ("2xA100-80GB, pipeline 2, 4 micro-batches of 1 x 4096 tokens, 1f1b, recomputing none")
    assert measured["step"]["measured"] / measured["step"]["predicted"] == pytest.approx(1.1)
    assert measured["memory"]["measured"] == 2**30


def test_a_calibrated_plan_is_compared_without_its_corrections(run: Any, plan: db.Plan) -> None:
    run("calibrate", "plan.json", "--step", slower(plan, 1.1))
    uncorrected = db.plan(db.models["llama-tiny"], db.Cluster.parse("cluster.yaml"), micro_batches=4, planner="dapple")
    uncorrected.save("again.json")

    code, out, _ = run("calibrate", "again.json", "--step", slower(plan, 1.2), "--json")

    assert code == 0
    step = json.loads(out)["figures"]["step"]
    assert step["predicted"] == pytest.approx(seconds_per_step(plan))
    assert step["ratio"] == pytest.approx(1.2)


def test_new_measurement_of_a_run_replaces_the_old_one(run: Any, plan: db.Plan) -> None:
    run("calibrate", "plan.json", "--step", slower(plan, 1.1), "--memory", "1GiB")
    _, out, _ = run("calibrate", "plan.json", "--step", slower(plan, 1.3), "--cluster", "cluster.yaml")

    assert "its figures are replaced" in out
    (measured,) = db.Cluster.parse("cluster.yaml").calibration
    assert measured.step is not None
    assert measured.step.measured == pytest.approx(1.3 * seconds_per_step(plan))
    assert measured.memory is not None


def test_measured_runs_are_not_overwritten(run: Any, plan: db.Plan) -> None:
    run("calibrate", "plan.json", "--step", slower(plan, 1.1))
    db.plan("llama-tiny", "2xA100-80GB", micro_batches=8, planner="dapple").save("other.json")
    code, _, error = run("calibrate", "other.json", "--memory", "1GiB")

    assert code == 2
    assert "cluster.yaml has measured runs: --cluster cluster.yaml adds this one to them" in error


def test_a_file_of_other_devices_corrects_the_run_alike(run: Any, plan: db.Plan) -> None:
    Path("large.yaml").write_text("devices: 8xA100-80GB\n")
    _, alone, _ = run("calibrate", "plan.json", "--step", slower(plan, 1.2), "-o", "small.yaml")
    _, added, _ = run("calibrate", "plan.json", "--step", slower(plan, 1.2), "--cluster", "large.yaml")

    assert added.partition(",")[0] == alone.partition(",")[0]
    assert added.partition(";")[2].partition(",")[0] == alone.partition(";")[2].partition(",")[0]
    assert "The plan ran on 2xA100-80GB; the file is of 8xA100-80GB." in added


def test_the_same_job_planned_there_takes_the_measured_step(run: Any, json_of: Any, plan: db.Plan) -> None:
    run("calibrate", "plan.json", "--step", slower(plan, 1.2))
    call = ("plan", "llama-tiny", "--micro-batches", "4", "--planner", "dapple", "--cluster")

    before, after = (json_of(*call, where)["step_time"] for where in ("2xA100-80GB", "cluster.yaml"))

    assert after / before == pytest.approx(1.2**STEP.of_job)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give a log or trace of the run, --step SECONDS or --memory SIZE"),
        (("--step", "1000"), "check that the plan is the one that ran"),
        (("--step", "nan"), "--step must be above 0, not nan"),
        (("--memory", "0GiB"), "--memory must be positive"),
        (("--memory", "81GiB"), "A100-80GB has 80.00 GiB, less than the measured 81.00 GiB."),
        (("--step", "0.02", "-o", "cluster.txt"), "it ends in .yaml, .yml or .json"),
        (("--step", "0.02", "--cluster", "2xL4"), "The plan ran on A100-80GB, not L4-24GB"),
    ],
)
def test_useless_calibration_is_refused(run: Any, plan: db.Plan, arguments: tuple[str, ...], message: str) -> None:
    code, out, error = run("calibrate", "plan.json", *arguments)

    assert (code, out) == (2, "")
    assert message in error
    assert not Path("cluster.yaml").exists()


def test_missing_input_is_reported(run: Any, plan: db.Plan) -> None:
    Path("log.txt").write_text("")
    small_plan().save("small.json")
    code, _, error = run("calibrate", "plan.json", "log.txt", "--step", slower(plan, 1.1))

    assert code == 0
    assert "neither a step nor memory" in error
    code, _, error = run("calibrate", "small.json", "--step", "1")
    assert code == 2
    assert "Only a MODEL's plan can be calibrated" in error


def test_compare_refuses_other_files_as_traces(run: Any, plan: db.Plan) -> None:
    Path("notes.txt").write_text("[1]")

    assert "plan.json is a plan: `debubble show plan.json plan.json`" in run("compare", "plan.json", "plan.json")[2]
    assert "notes.txt is not a whole trace file" in run("compare", "plan.json", "notes.txt")[2]
    Path("train.log").write_text("[2026-01-01] iteration 1/ 9 | elapsed time per iteration (ms): 2500.0 |")
    code, _, error = run("compare", "plan.json", "train.log")
    assert code == 2
    assert "its median step takes 2.5 s: `debubble calibrate plan.json train.log` compares" in error
