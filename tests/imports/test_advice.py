"""Settings that a job leaves off and that would make it faster or let it fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.formatting import size_words
from debubble.frameworks.megatron.changes import FULL_RECOMPUTATION, OTHER_CHECKPOINTS, notes, switches
from debubble.imports import imports
from debubble.imports.advice import SettingAdvice, setting_advice
from debubble.imports.calibration import calibrate
from debubble.imports.figures import Figures
from debubble.imports.logs import MeasuredFigures
from debubble.imports.registry import UserFacts
from debubble.ir import RunOptions
from debubble.planners.plan_step import seconds_per_step
from tests.imports.test_megatron import SCRIPT

SEQUENCE = {"--sequence-parallel": True}
DIVIDED = {**SEQUENCE, "--tp-comm-overlap": True}
STATES, FULL = "--use-distributed-optimizer", [*FULL_RECOMPUTATION]
TENSOR = "--tensor-model-parallel-size 4"


def advice(tmp_path: Path, extra: str, cluster: str) -> tuple[Figures, tuple[SettingAdvice, ...]]:
    (tmp_path / "job.sh").write_text(SCRIPT.replace("EXTRA", extra))
    importer, facts = imports["megatron"], UserFacts(cluster=db.Cluster.parse(cluster))
    settings = importer.read(tmp_path / "job.sh", None)
    plan = importer.job(settings, tmp_path / "job.sh", facts).plan(facts.cluster)
    return Figures.from_plan(plan), setting_advice(importer, settings, tmp_path / "job.sh", facts, plan)


def test_sequence_parallelism_and_its_overlap_are_advised(tmp_path: Path) -> None:
    now, hints = advice(tmp_path, TENSOR, "16xA100-80GB")
    _, on = advice(tmp_path, f"{TENSOR} --sequence-parallel", "16xA100-80GB")

    assert [hint.settings for hint in hints] == [DIVIDED]
    assert [hint.settings for hint in on] == [{"--tp-comm-overlap": True}]
    assert on[0].step_time == hints[0].step_time < now.step_time


def test_removing_a_host_optimizer_is_advised(tmp_path: Path) -> None:
    offload = "--use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 1.0"
    now, hints = advice(tmp_path, f"{TENSOR} --sequence-parallel --tp-comm-overlap {offload}", "16xA100-80GB")
    [hint_of_removal] = [hint for hint in hints if hint.settings == {"--optimizer-cpu-offload": None}]

    assert hint_of_removal.step_time < now.step_time
    assert hint_of_removal.words(now).startswith("leave out --optimizer-cpu-offload: ")


def test_measured_corrections_apply_equally_with_a_switch_on(tmp_path: Path) -> None:
    """The gain of a switch is separate from the correction by measured runs."""
    (tmp_path / "job.sh").write_text(SCRIPT.replace("EXTRA", f"{TENSOR} --sequence-parallel"))
    importer, facts = imports["megatron"], UserFacts(cluster=db.Cluster.parse("16xA100-80GB"))
    settings = importer.read(tmp_path / "job.sh", None)
    plan = importer.job(settings, tmp_path / "job.sh", facts).plan(facts.cluster)
    measured = calibrate(plan, MeasuredFigures(step=1.3 * seconds_per_step(plan))).cluster
    recalibrated = importer.job(settings, tmp_path / "job.sh", facts).plan(measured)
    plain, corrected = (
        setting_advice(importer, settings, tmp_path / "job.sh", UserFacts(cluster=on), planned)[0].step_time
        / seconds_per_step(planned)
        for on, planned in ((facts.cluster, plan), (measured, recalibrated))
    )

    assert corrected == pytest.approx(plain)


def test_smaller_micro_batches_count_full_gradients(tmp_path: Path) -> None:
    """Automodel keeps full gradients if a step has several micro-batches, as it has with smaller ones."""
    text = """
model: {{pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B}}
distributed: {{strategy: fsdp2, dp_size: 8}}
step_scheduler: {{local_batch_size: {size}, global_batch_size: 64}}
dataset: {{seq_length: 4096}}
"""
    importer, facts = imports["automodel"], UserFacts(cluster=db.Cluster.parse("8xH100-80GB"))
    plans = {}
    for size in (8, 1):
        (file := tmp_path / f"{size}.yaml").write_text(text.format(size=size))
        settings = importer.read(file, None)
        plans[size] = importer.job(settings, file, facts).plan(facts.cluster)
        if size == 8:
            hints = setting_advice(importer, settings, file, facts, plans[size])
    hint_by_size = {hint.settings["micro-batch size"]: hint for hint in hints if "micro-batch size" in hint.settings}

    assert hint_by_size[1].peak_memory == Figures.from_plan(plans[1]).peak_memory


def test_largest_saving_is_advised_if_nothing_makes_it_fit(tmp_path: Path) -> None:
    now, hints = advice(tmp_path, f"{TENSOR} --num-layers 256", "16xRTX4080-16GB")

    assert list(hints[0].settings) == ["--sequence-parallel", *FULL]
    assert hints[0].words(now).endswith(" less, which does not fit either")


def test_advice_is_a_prediction_of_the_changed_job(tmp_path: Path) -> None:
    _, hints = advice(tmp_path, TENSOR, "16xA100-80GB")
    changed, _ = advice(tmp_path, f"{TENSOR} --sequence-parallel --tp-comm-overlap", "16xA100-80GB")
    assert (hints[0].step_time, hints[0].peak_memory) == (changed.step_time, changed.peak_memory)


def test_settings_that_let_a_job_fit_are_advised(tmp_path: Path) -> None:
    now, hints = advice(tmp_path, f"{TENSOR} --micro-batch-size 4", "16xA100-40GB")
    switched = next(hint for hint in hints if hint.settings == DIVIDED)
    less = size_words(now.peak_memory - switched.peak_memory)

    assert not now.fits
    assert switched.fits
    assert switched.words(now).startswith("--sequence-parallel --tp-comm-overlap: fits with ")
    assert switched.words(now).endswith(f"% faster, {less} less")


def test_the_largest_micro_batches_that_fit_are_advised(tmp_path: Path) -> None:
    now, hints = advice(tmp_path, f"{TENSOR} --micro-batch-size 16", "16xRTX4080-16GB")
    assert not now.fits
    assert [hint.settings["micro-batch size"] for hint in hints if "micro-batch size" in hint.settings] == [1]


def test_job_without_switches_gets_no_advice(tmp_path: Path) -> None:
    assert advice(tmp_path, "", "4xA100-80GB")[1] == ()


def test_torchtitan_is_advised_to_compile(tmp_path: Path, run: Any) -> None:
    (tmp_path / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n')
    _, out, _ = run("import", "torchtitan", str(tmp_path / "job.toml"), "--cluster", "8xH100-80GB", "--as-it-is")
    assert "\nWould help: compile.enable: " in out


def test_the_answer_has_the_advice_in_a_line(run: Any, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SCRIPT.replace("EXTRA", TENSOR))
    _, out, _ = run("import", "megatron", str(tmp_path / "job.sh"), "--cluster", "16xA100-80GB", "--as-it-is")
    assert "\nWould help: --sequence-parallel --tp-comm-overlap: " in out


def test_recomputation_that_fits_is_advised_for_torchtitan(tmp_path: Path, run: Any) -> None:
    config = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[compile]\nenable = true\n[activation_checkpoint]\nmode = "none"\n'
    )
    (tmp_path / "job.toml").write_text(f"{config}[training]\nlocal_batch_size = 2\nseq_len = 8192\n")
    _, out, _ = run("import", "torchtitan", str(tmp_path / "job.toml"), "--cluster", "8xH100-80GB", "--as-it-is")
    assert "\nWould help: micro-batch size 1: fits with " in out
    assert "; activation_checkpoint.mode full: fits with " in " ".join(out.split())


def test_deepspeed_is_advised_of_the_zero_level_that_fits(tmp_path: Path, run: Any) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    options = ("--model", "llama3-8b", "--sequence-length", "2048", "--as-it-is")
    _, out, _ = run("import", "deepspeed", str(tmp_path / "ds.json"), "--cluster", "8xA100-40GB", *options)
    assert "\nWould help: zero_optimization.stage 3: fits with " in out


def test_dropping_needless_offload_is_advised_for_deepspeed(tmp_path: Path) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    config["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    path, importer = tmp_path / "ds.json", imports["deepspeed"]
    path.write_text(json.dumps(config))
    cluster = db.Cluster.parse("8xA100-80GB")
    facts = UserFacts(cluster=cluster, model=db.models["mistral-7b"], sequence_length=4096, recompute="full")
    settings = importer.read(path, None)

    hints = setting_advice(importer, settings, path, facts, importer.job(settings, path, facts).plan(cluster))

    assert [hint.settings for hint in hints] == [{"zero_optimization.offload_optimizer.device": "none"}]


@pytest.mark.parametrize(
    ("settings", "options", "names"),
    [
        ({}, {"data": 2}, [["--overlap-grad-reduce"], [STATES], FULL, [STATES, *FULL]]),
        ({"--recompute-activations": True}, {"data": 2}, [["--overlap-grad-reduce"], [STATES]]),
        ({}, {"data": 2, "zero": 1}, [["--overlap-grad-reduce", "--overlap-param-gather"], FULL]),
        ({"--overlap-grad-reduce": True}, {"data": 2, "zero": 1}, [["--overlap-param-gather"], FULL]),
        ({}, {"data": 2, "zero": 2}, [FULL]),
        (
            {"--transformer-impl": "local"},
            {"tensor": 2, "sequence_parallel": False},
            [["--sequence-parallel"], FULL, ["--sequence-parallel", *FULL]],
        ),
        ({"framework": "megatron-bridge"}, {"tensor": 2}, []),
        ({}, {"tensor": 2, "sequence_length": 4095}, [FULL]),
    ],
)
def test_switches_are_those_that_megatron_takes(
    settings: dict[str, Any], options: dict[str, Any], names: list[list[str]]
) -> None:
    assert [list(switch) for switch in switches(settings, RunOptions(**options))] == names


@pytest.mark.parametrize(
    ("job", "changed", "expected"),
    [
        ({}, {"--micro-batch-size": 4}, []),
        ({}, {"--use-megatron-fsdp": True, "--ckpt-format": "fsdp_dtensor"}, [OTHER_CHECKPOINTS]),
        ({"--use-torch-fsdp2": True}, {"--use-torch-fsdp2": None}, [OTHER_CHECKPOINTS]),
        ({"--use-torch-fsdp2": False}, {"--use-torch-fsdp2": None}, []),
        ({}, {"--ckpt-format": "torch_dist"}, []),
        ({"--ckpt-format": "torch_dcp"}, {"--ckpt-format": None}, [OTHER_CHECKPOINTS]),
    ],
)
def test_checkpoint_format_change_is_noted(job: dict[str, Any], changed: dict[str, Any], expected: list[str]) -> None:
    assert list(notes(job, changed)) == expected


@pytest.mark.parametrize(("local", "is_advised"), [(2, True), (16, False)])
def test_single_pass_instead_of_accumulation_is_advised(tmp_path: Path, run: Any, local: int, is_advised: bool) -> None:
    (tmp_path / "job.toml").write_text(
        f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = {local}\nglobal_batch_size = 16\n'
        'seq_len = 4096\n[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = "GPipe"\n'
    )
    code, out, _ = run(
        "import", "torchtitan", str(tmp_path / "job.toml"), "--cluster", "4xH100-80GB", "--effort", "0.1"
    )

    assert code == 0
    assert "parallelism.pipeline_parallel_schedule" in out
    assert (f"training.local_batch_size 16 (now {local})" in out) is is_advised
