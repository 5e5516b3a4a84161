"""Runs that a user measured correct the predictions of similar runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from measured.__main__ import row_of
from measured.calibration import estimated, targets
from measured.records import records

import debubble as db
from debubble import __version__
from debubble.costs import model_units
from debubble.costs.accuracy import accuracy_of
from debubble.costs.calibration import (
    FIGURES,
    MIN_UNCERTAINTY,
    Deviation,
    Figure,
    MeasuredRun,
    correction,
    described_run,
    error_shares,
    job_words,
)
from debubble.ir import InputError, RunOptions
from debubble.models import models
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.views import Scene
from debubble.views.plan_screen import plan_screen

RUN = MeasuredRun(
    run="mine", device="H100-80GB", family="llama", hidden=4096, dtype="bf16", version=__version__,
    step=Deviation(predicted=1.0, measured=math.exp(0.1)),
    memory=Deviation(predicted=20e9, measured=21e9),
)  # fmt: skip
TIMED = msgspec.structs.replace(RUN, memory=None)
SHARES = error_shares()
OPTIONS: Mapping[str, Any] = {
    "pipeline": 2, "tensor": 2, "data": 2, "micro_batches": 4, "planner": "dapple", "swap": "none",
}  # fmt: skip


def cluster(*runs: MeasuredRun) -> db.Cluster:
    return db.Cluster.from_dict({"devices": "8xH100-80GB", "calibration": msgspec.to_builtins(list(runs))})


def planned(on: db.Cluster, **options: Any) -> Plan:
    return db.plan(models["llama3-8b"], on, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("other", "share"),
    [
        ({}, SHARES["step"].model + SHARES["step"].dtype),
        ({"dtype": "fp8"}, SHARES["step"].model),
        ({"hidden": 8192}, SHARES["step"].dtype),
        ({"device": "A100-80GB"}, 0.0),
        ({"framework": "torchtitan"}, 0.0),
    ],
)
def test_similar_runs_share_errors(other: dict[str, Any], share: float) -> None:
    result = correction("step", [RUN], msgspec.structs.replace(RUN, **other))

    assert result.deviation == pytest.approx(0.1 * share)
    assert result.uncertainty == pytest.approx(math.sqrt(1 - share**2))


@pytest.mark.parametrize("framework", ["", "target", "target,gradient_overlap=true"])
def test_unnamed_frameworks_are_the_same_framework(framework: str) -> None:
    run = described_run(models["llama3-8b"], cluster(), RunOptions(framework=framework))

    assert run == described_run(models["llama3-8b"], cluster(), RunOptions())


@pytest.mark.parametrize(("device", "similar"), [("H100-80GB", True), ("A100-80GB", False)])
def test_a_plan_says_if_no_measured_run_is_similar(device: str, similar: bool) -> None:
    plan = planned(cluster(msgspec.structs.replace(RUN, device=device)))
    scene = Scene.predicted(plan)
    assert scene.why is not None
    text = "\n".join(map(str, plan_screen(plan, scene, scene.why, width=200, tokens=None)))

    assert ("no measured run of the cluster is like this job" in text) != similar
    assert ("a run of llama of hidden size 4096, or dense models in bf16, on H100-80GB" in text) != similar


JOB = RunOptions(tensor=2, data=2)


@pytest.mark.parametrize(
    ("devices", "options", "same"),
    [
        (8, JOB, True),
        (16, replace(JOB, data=4), True),
        (8, replace(JOB, post_validation=True), True),
        (8, replace(JOB, tensor=1, data=4), False),
        (8, replace(JOB, micro_batch_size=2), True),
        (8, replace(JOB, zero=1), True),
        (8, replace(JOB, zero=3), False),
        (8, replace(JOB, sequence_parallel=False, gradient_dtype="bf16"), True),
        (8, replace(JOB, framework="target,tensor_overlap=true"), True),
        (8, replace(JOB, framework="megatron-lm@2025.06"), False),
    ],
)
def test_runs_of_a_job_have_the_same_options_and_degrees(devices: int, options: RunOptions, same: bool) -> None:
    assert (job_words(devices, options) == job_words(8, JOB)) == same


@pytest.mark.parametrize("figure", FIGURES)
def test_a_run_of_the_same_job_has_the_largest_weight(figure: Figure) -> None:
    run = msgspec.structs.replace(RUN, job="pipeline 2")
    same, other = (
        correction(figure, [run], msgspec.structs.replace(run, job=job)) for job in ("pipeline 2", "pipeline 4")
    )

    assert same.deviation == pytest.approx(SHARES[figure].of_job * (run.deviation(figure) or 0.0))
    assert other.deviation == pytest.approx(SHARES[figure].of_model * (run.deviation(figure) or 0.0))
    assert SHARES[figure].of_model < SHARES[figure].of_job <= 0.9
    assert same.uncertainty == MIN_UNCERTAINTY < other.uncertainty


def test_the_plan_of_a_measured_job_takes_its_measured_time() -> None:
    """The plan takes most of the deviation; a plan with another ZeRO level takes less of it."""
    plain = planned(cluster())
    run = described_run(models["llama3-8b"], cluster(), plain.options, run="mine")
    predicted = seconds_per_step(plain)
    measured = cluster(msgspec.structs.replace(run, step=Deviation(predicted=predicted, measured=1.2 * predicted)))

    same, other = planned(measured), planned(measured, zero=3)
    assert seconds_per_step(same) / predicted == pytest.approx(1.2 ** SHARES["step"].of_job)
    ratio = seconds_per_step(other) / seconds_per_step(planned(cluster(), zero=3))
    assert ratio == pytest.approx(1.2 ** SHARES["step"].of_model)


def test_slices_are_corrected_by_their_measured_job() -> None:
    options = RunOptions(slices=4)
    plain = model_units(models["llama3-8b"], cluster(), options)
    run = described_run(models["llama3-8b"], cluster(), options)
    measured = cluster(msgspec.structs.replace(run, step=Deviation(predicted=1.0, measured=1.2)))

    ratio = model_units(models["llama3-8b"], measured, options).units[1].forward / plain.units[1].forward
    assert ratio == pytest.approx(1.2 ** SHARES["step"].of_job)


def test_two_runs_have_more_weight_than_one() -> None:
    other = msgspec.structs.replace(RUN, run="other")
    one, two = (correction("step", runs, RUN) for runs in ([RUN], [RUN, other]))
    share = SHARES["step"].model + SHARES["step"].dtype

    assert two.weight == pytest.approx(2 * share / (1 + share))
    assert two.uncertainty < one.uncertainty < 1
    assert correction("memory", [TIMED], RUN).runs == 0  # TIMED has no memory figure.


def test_calibration_corrects_the_peak_memory() -> None:
    plain, calibrated = (planned(on).simulate().peak_memory for on in (cluster(), cluster(RUN)))
    added = correction("memory", [RUN], RUN).deviation

    assert [more - less for less, more in zip(plain, calibrated, strict=True)] == pytest.approx([added] * 2)


@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 2, "host_optimizer": 0.5}], ids=str)
def test_every_operation_takes_the_corrected_time(options: dict[str, Any]) -> None:
    plain, calibrated = (planned(on, **options) for on in (cluster(), cluster(TIMED)))
    factor, ends = correction("step", [RUN], RUN).factor, [float(op.end) for op in plain.simulate().operations]

    assert [float(op.end) for op in calibrated.simulate().operations] == pytest.approx([factor * end for end in ends])
    assert seconds_per_step(calibrated) == pytest.approx(factor * seconds_per_step(plain))
    assert calibrated.lower_bound == pytest.approx(factor * float(plain.lower_bound))


def test_a_calibrated_interval_is_narrower() -> None:
    before, after = (accuracy_of("step", models["llama3-8b"], on, RunOptions()) for on in (cluster(), cluster(RUN)))

    assert after.high / after.low < before.high / before.low
    assert after.group == f"{before.group}, 1 measured here"


def test_a_calibration_of_another_version_has_a_remark() -> None:
    old = msgspec.structs.replace(RUN, version="0.0.1")

    assert cluster(RUN).remarks == ()
    assert "run `debubble calibrate` again" in cluster(old).remarks[0]


@pytest.mark.parametrize(
    ("measured", "message"),
    [(0.0, "a step that is not positive"), (11.0, "more than 10 times off"), (math.inf, "positive")],
)
def test_impossible_figures_are_refused(measured: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster(msgspec.structs.replace(RUN, step=Deviation(predicted=1.0, measured=measured)))


def test_a_plan_names_the_framework_of_unused_runs() -> None:
    plan = planned(cluster(msgspec.structs.replace(RUN, framework="torchtitan")))
    scene = Scene.predicted(plan)
    assert scene.why is not None
    text = "\n".join(map(str, plan_screen(plan, scene, scene.why, width=200, tokens=None)))

    assert "its runs count with --framework torchtitan" in text


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.json"])
def test_a_cluster_file_keeps_its_measured_runs(tmp_path: Path, name: str) -> None:
    cluster(RUN).save(tmp_path / name, notes=["Mine."])

    assert db.Cluster.parse(tmp_path / name) == cluster(RUN)
    with pytest.raises(InputError, match=r"ends in \.yaml, \.yml or \.json"):
        cluster(RUN).save(tmp_path / "cluster.txt")


def test_corrected_static_bytes_are_never_negative() -> None:
    units = model_units(models["llama-tiny"], db.Cluster.parse("1xA100-80GB")).corrected(1.0, -1e12)
    schedule = db.schedules["1f1b"](devices=1, micro_batches=1)
    costs = units.stage_costs([[(index, "none") for index in range(len(units.units))]], schedule.placement)

    assert costs.static == (0,)


def test_runs_are_predicted_from_others_of_their_source() -> None:
    rows = [row_of(record) for record in records() if record.name.startswith("llm_foundry/0")]

    sources = {target.row["record"].name: [run.run for run in target.peers] for target in targets(rows, "step")}

    assert "llm_foundry/01" not in sources  # the only one in bf16 on an A100-80GB
    assert sources["llm_foundry/03"] == ["llm_foundry/04", "llm_foundry/06", "llm_foundry/09"]


@pytest.mark.slow
def test_the_shares_are_those_of_the_fitted_half() -> None:
    rows = [row_of(record) for record in records()]

    assert {figure: estimated(rows, figure) for figure in FIGURES} == error_shares()
