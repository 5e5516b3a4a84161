"""`debubble import` as a user calls it: the job as it is, the plan, and the settings to change."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.costs.accuracy import Accuracy
from debubble.frameworks.megatron.changes import OTHER_CHECKPOINTS, conflicts, required
from debubble.imports import imports
from debubble.imports.comparison import JobComparison, SettingChange, compare
from debubble.imports.figures import Figures
from debubble.plans import Plan
from tests.imports.test_megatron import SCRIPT

ROOT = Path(__file__).parents[2]
RECOMPUTING = SCRIPT.replace(
    "EXTRA", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)


@pytest.fixture
def megatron(run: Any, tmp_path: Path) -> Any:
    """Call `debubble import megatron` on a script; returns (exit code, standard output, standard error)."""

    def call(text: str, *arguments: str) -> Any:
        (tmp_path / "job.sh").write_text(text)
        return run("import", "megatron", str(tmp_path / "job.sh"), "--planner", "adapipe", *arguments)

    return call


def unwrapped(out: str) -> str:
    """An answer without its line breaks."""
    return " ".join(out.split())


def test_the_answer_compares_and_names_the_settings_to_change(megatron: Any, tmp_path: Path) -> None:
    code, out, _ = megatron(RECOMPUTING, "--cluster", "4xA100-80GB", "--json", "-o", str(tmp_path / "plan.json"))
    answer = json.loads(out)
    changes = {change["name"]: (change["now"], change["then"]) for change in answer["changes"]}

    assert code == 0
    assert answer["planned"]["step_time"] < answer["yours"]["step_time"]
    assert answer["planned"]["fits"]
    assert changes["--recompute-granularity"] == ("full", None)
    assert changes["--pipeline-model-parallel-layout"][0] is None
    assert Plan.load(tmp_path / "plan.json").target == "megatron"


def test_the_answer_names_the_model_and_the_planned_degrees(megatron: Any) -> None:
    _, out, _ = megatron(RECOMPUTING, "--cluster", "4xA100-80GB", "--degrees", "--planner", "auto", "--effort", "0.2")

    assert re.match(r"llama, [\d.]+ [BM] parameters on 4 x A100-80GB: pipeline 4", unwrapped(out))
    assert "\nIts degrees: " in out


def test_arguments_that_conflict_with_the_plan_are_removed(megatron: Any) -> None:
    job = SCRIPT.replace("EXTRA", "--num-virtual-stages-per-pipeline-rank 2 --recompute-activations")
    _, out, _ = megatron(job, "--cluster", "4xA100-80GB")

    assert "Yours: " in out
    assert "\nPlanned: " in out
    assert "  --pipeline-model-parallel-layout " in out
    assert "  leave out --num-virtual-stages-per-pipeline-rank\n" in out


@pytest.mark.parametrize(
    ("changed", "removed"),
    [
        ({}, []),
        ({"--recompute-granularity": None}, ["--recompute-activations"]),
        ({"--pipeline-model-parallel-layout": "Et|tL"}, ["--decoder-first-pipeline-num-layers"]),
        ({"--pipeline-model-parallel-layout": None}, []),
    ],
)
def test_only_arguments_of_the_job_conflict(changed: dict[str, str | None], removed: list[str]) -> None:
    job = {"--recompute-activations": True, "--decoder-first-pipeline-num-layers": "3"}
    assert list(conflicts(job, changed)) == removed


FSDP = {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": "optim_grads_params"}
FSDP2 = {"--use-torch-fsdp2": True}
IN_DTENSORS, IN_DCP = {"--ckpt-format": "fsdp_dtensor"}, {"--ckpt-format": "torch_dcp"}


@pytest.mark.parametrize(
    ("job", "changed", "wanted"),
    [
        ({}, {}, {}),
        ({"--ckpt-format": "torch_dist"}, {}, {}),
        (FSDP, {}, IN_DTENSORS),
        ({**FSDP, "--ckpt-format": "torch_dist"}, {"--micro-batch-size": 4}, IN_DTENSORS),
        ({**FSDP, **IN_DTENSORS}, {}, {}),
        ({**FSDP, **IN_DTENSORS}, {**dict.fromkeys(FSDP), "--ckpt-format": None}, {}),
        ({**FSDP2, **IN_DCP}, {}, {}),
        ({**FSDP2, **IN_DCP}, {"--tensor-model-parallel-size": 2}, {"--ckpt-format": None}),
        ({**FSDP2, **IN_DCP}, {"--pipeline-model-parallel-size": 2}, {**FSDP, **IN_DTENSORS}),
        ({**FSDP2, **IN_DCP}, {"--use-megatron-fsdp": None}, {"--ckpt-format": None}),
    ],
)
def test_checkpoint_format_depends_on_sharding(
    job: dict[str, Any], changed: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """As required by Megatron-LM's validate_args."""
    assert dict(required(job, changed)) == wanted


@pytest.mark.parametrize("changed", [{"--use-megatron-fsdp": None}, {"--pipeline-model-parallel-size": 2}])
def test_torch_fsdp_is_removed_if_the_plan_has_none(changed: dict[str, Any]) -> None:
    assert list(conflicts(FSDP2, changed)) == ["--use-torch-fsdp2"]


def test_fsdp_job_gets_the_checkpoint_format(megatron: Any) -> None:
    fsdp = f"{' '.join(f'{name} {value}' for name, value in FSDP.items())} --ckpt-format torch_dist".replace(
        " True", ""
    )
    _, out, _ = megatron(
        RECOMPUTING.replace("--bf16", f"--bf16 --use-distributed-optimizer {fsdp}"), "--cluster", "4xA100-80GB"
    )

    assert "  --ckpt-format fsdp_dtensor (now torch_dist)\n" in out
    assert OTHER_CHECKPOINTS in unwrapped(out)


def test_the_answer_has_pace_and_intervals(megatron: Any) -> None:
    _, out, _ = megatron(SCRIPT, "--cluster", "4xA100-80GB", "--as-it-is")
    words = unwrapped(out)

    assert re.search(r"Yours: [\d.]+ s \([\d.]+ s to [\d.]+ s\), [\d,]+ tokens/s per GPU, MFU [\d.]+%; ", words)
    assert re.search(r" of 72\.00 GiB \(up to [\d.]+ GiB\)", words)


def test_gain_within_the_interval_is_reported() -> None:
    accuracy = Accuracy(runs=9, half=0.1, most=0.2, group="all", low=0.9, high=1.1)
    yours, near, far = (
        Figures(
            step_time=step, peak_memory=1.0, memory_limit=2.0, host_memory=0.0,
            host_memory_limit=None, fits=True, tokens_per_second_per_device=1.0, mfu=0.5,
            accuracy={"step": accuracy.scaled_to(step), "memory": accuracy.scaled_to(1.0)},
        )
        for step in (1.0, 0.95, 0.8)
    )  # fmt: skip
    change = SettingChange(name="--a", now=None, then=True)
    texts = [" ".join(JobComparison(yours=yours, planned=p, changes=(change,)).sentences()) for p in (near, far)]

    assert ["less than the interval: measure both" in words for words in texts] == [True, False]


def test_interrupted_search_is_reported() -> None:
    yours = db.plan("llama3.2-1b", cluster="2xL40S-48GB", micro_batches=2, planner="portfolio", effort=0.1)
    cut = tuple(replace(candidate, interrupted=True) for candidate in yours.candidates)
    interrupted = replace(yours, candidates=cut)
    comparison, _ = compare(imports["megatron"], {}, yours, lambda: interrupted)

    assert "Not tried: the rest of the search (Ctrl-C)." in comparison.sentences()


def test_modules_are_printed_by_stage() -> None:
    then = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2"], ["layers.3", "layers.4", "norm"]]
    change = SettingChange(name="parallelism.module_fqns_per_model_part", now=None, then=then)

    assert str(change) == (
        "parallelism.module_fqns_per_model_part [tok_embeddings layers.0..1] [layers.2] [layers.3..4 norm]"
    )


def test_settings_of_a_command_line_are_quoted_for_the_shell() -> None:
    change = SettingChange(name="--pipeline-model-parallel-layout", now=None, then="Et|(t|)*2tL")

    assert str(change) == "--pipeline-model-parallel-layout 'Et|(t|)*2tL'"


def test_job_that_does_not_fit_gets_settings_that_do(megatron: Any) -> None:
    _, out, _ = megatron(SCRIPT, "--cluster", "4xA100-40GB")

    assert "What fits (tried, in options of `debubble plan`; --degrees plans other degrees):" in unwrapped(out)
    assert re.search(r"^  --.*: [0-9.]+ s per step", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--recompute-activations", "recomputing selective (core) in every layer"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            "recomputing full in 8 of 32 layers",
        ),
    ],
)
def test_recomputation_is_reported_in_layers(megatron: Any, flags: str, words: str) -> None:
    _, out, _ = megatron(SCRIPT.replace("EXTRA", flags), "--cluster", "4xA100-80GB", "--as-it-is")

    assert words in unwrapped(out)


PRODUCT = SCRIPT.replace("torchrun --nproc_per_node 4", "WORLD_SIZE=$((2*8))\nsrun python")
ACTORS = SCRIPT.replace("torchrun --nproc_per_node 4", "python").replace(
    "EXTRA", "--actor-num-nodes 2 --actor-num-gpus-per-node 8"
)


@pytest.mark.parametrize(
    ("script", "devices", "more", "warning"),
    [
        (SCRIPT, 4, (), None),
        (SCRIPT, 8, (), "The job starts 4 ranks (--nproc-per-node 4), and --cluster has 8"),
        (PRODUCT, 8, (), "The job starts 16 ranks (--world-size 16)"),
        (ACTORS, 4, (), "The job starts 16 ranks (--actor-num-nodes 2 x --actor-num-gpus-per-node 8)"),
        (SCRIPT, 4, ("--args", "PP=2"), "--args has PP=2, which the script itself sets to '4': change it there."),
    ],
)
def test_contradictions_of_the_script_are_warned_about(
    megatron: Any, script: str, devices: int, more: tuple[str, ...], warning: str | None
) -> None:
    _, out, _ = megatron(script, "--cluster", f"{devices}xA100-80GB", "--as-it-is", *more)

    assert f"Warning: {warning}" in unwrapped(out) if warning else "Warning: " not in out


def test_json_names_every_entry(megatron: Any) -> None:
    flags = [f"--unheard-of-{number}" for number in range(20)]
    job = SCRIPT.replace("EXTRA", " ".join(flags))
    _, out, _ = megatron(job, "--cluster", "4xA100-80GB", "--as-it-is", "--json")
    _, shown, _ = megatron(job, "--cluster", "4xA100-80GB", "--as-it-is")

    assert all(flag in " ".join(json.loads(out)["unread"]) for flag in flags)
    assert " ".join(sorted(flags)) in unwrapped(shown)


def test_lines_are_no_wider_than_the_terminal(megatron: Any) -> None:
    flags = " ".join(f"--unheard-of-{number}" for number in range(20))
    _, out, _ = megatron(SCRIPT.replace("EXTRA", flags), "--cluster", "4xA100-80GB", "--as-it-is")
    assert max(map(len, out.splitlines())) <= 80


def test_correction_by_a_measured_run_is_reported(megatron: Any, run: Any, tmp_path: Path) -> None:
    plan, cluster = str(tmp_path / "plan.json"), str(tmp_path / "cluster.yaml")
    megatron(SCRIPT, "--cluster", "4xA100-80GB", "--as-it-is", "-o", plan)
    run("calibrate", plan, "--step", "5", "-o", cluster)
    _, out, _ = megatron(SCRIPT, "--cluster", cluster, "--as-it-is")

    assert "The prediction is corrected by 1 measured run of the cluster: the step " in unwrapped(out)


def test_no_plan_is_written_where_none_fits(megatron: Any, tmp_path: Path) -> None:
    code, out, err = megatron(SCRIPT, "--cluster", "4xL4", "-o", str(tmp_path / "plan.json"))

    assert code == 1
    assert ", which does not fit." in unwrapped(out)
    assert "No plan fits: The model's states alone need" in unwrapped(out)
    assert "plan.json is not written: the job does not fit, and there is no other plan." in " ".join(
        (out + err).split()
    )
    assert not (tmp_path / "plan.json").exists()


def test_changes_without_a_setting_are_described_in_words(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": true},'
        ' "zero_optimization": {"stage": 3}}'
    )
    asked = ("--model", "llama3.2-1b", "--pipeline", "1", "--sequence-length", "2048", "--recompute", "full")
    _, out, _ = run("import", "deepspeed", str(config), *asked, "--cluster", "8xA100-80GB", "--effort", "0.2")

    assert "Planned: " in out
    words = "has no setting for it; change in the script that it starts: recompute nothing (now full in every"
    assert words in unwrapped(out)


def test_best_job_is_unchanged(megatron: Any, tmp_path: Path) -> None:
    planned = tmp_path / "planned.json"
    megatron(RECOMPUTING, "--cluster", "4xA100-80GB", "-o", str(planned))
    layout = json.loads(megatron(RECOMPUTING, "--cluster", "4xA100-80GB", "--json")[1])["changes"]
    new = next(change["then"] for change in layout if change["name"].endswith("layout"))
    _, out, _ = megatron(
        SCRIPT.replace("EXTRA", f"--pipeline-model-parallel-layout '{new}'"), "--cluster", "4xA100-80GB"
    )

    assert "Nothing faster was found." in unwrapped(out)


def test_stages_of_deepspeed_are_among_the_changes(tmp_path: Path, json_of: Any) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "bf16": {"enabled": true}}'
    )
    answer = json_of(
        "import", "deepspeed", str(config), "--model", "llama3-8b", "--pipeline", "4", "--sequence-length", "4096",
        "--cluster", "4xA100-80GB", "--planner", "adapipe",
    )  # fmt: skip

    assert answer["planned"]["step_time"] < answer["yours"]["step_time"]
    assert "planned_pipeline.py: BOUNDS" in {change["name"] for change in answer["changes"]}


def test_fsdp_job_gets_changes_of_its_settings(tmp_path: Path, json_of: Any) -> None:
    config = tmp_path / "llama3.toml"
    config.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n'
        '[parallelism]\ndata_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = "full"\n'
    )
    answer = json_of("import", "torchtitan", str(config), "--cluster", "8xH100-80GB", "--planner", "adapipe")
    assert answer["changes"] == [{"name": "activation_checkpoint.mode", "now": "full", "then": "none"}]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed"])
def test_page_matches_the_output_of_import(run: Any, framework: str) -> None:
    text = (ROOT / "docs" / "imports.md").read_text()
    shown = re.search(rf"```\n(debubble import {framework} [^\n]*)\n.*?```\n+```\n(.*?)```", text, re.DOTALL)
    assert shown is not None
    code, out, _ = run(*shown[1].replace("examples/", f"{ROOT}/examples/").replace(" -o plan.json", "").split()[1:])

    assert code == 0
    assert [passage for passage in re.split(r"^\.\.\.\n", shown[2], flags=re.MULTILINE) if passage not in out] == []
