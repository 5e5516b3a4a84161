"""`debubble import` as a user calls it: yours, planned, and what to change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from debubble.frameworks.megatron.import_ import conflicts
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


def test_what_megatron_refuses_beside_the_plans_settings_is_left_out(megatron: Any) -> None:
    job = SCRIPT.replace("EXTRA", "--num-virtual-stages-per-pipeline-rank 2 --recompute-activations")
    _, out, _ = megatron(job, "--cluster", "4xA100-80GB")

    assert "  --pipeline-model-parallel-layout " in out
    assert "  leave out --num-virtual-stages-per-pipeline-rank\n" in out


@pytest.mark.parametrize(
    ("changed", "left_out"),
    [
        ({}, []),
        ({"--recompute-granularity": None}, ["--recompute-activations"]),
        ({"--pipeline-model-parallel-layout": "Et|tL"}, ["--decoder-first-pipeline-num-layers"]),
        ({"--pipeline-model-parallel-layout": None}, []),
    ],
)
def test_an_argument_in_conflict_is_one_that_the_job_has(changed: dict[str, str | None], left_out: list[str]) -> None:
    job = {"--recompute-activations": True, "--decoder-first-pipeline-num-layers": "3"}
    assert list(conflicts(job, changed)) == left_out


def test_the_answer_is_a_sentence_and_a_line_per_setting(megatron: Any) -> None:
    _, out, _ = megatron(RECOMPUTING, "--cluster", "4xA100-80GB")

    assert "Yours: " in out
    assert "; planned: " in out
    assert "  leave out --recompute-granularity\n" in out


def test_a_job_that_does_not_fit_is_predicted_all_the_same(megatron: Any) -> None:
    _, out, _ = megatron(SCRIPT, "--cluster", "4xA100-40GB", "--as-it-is")

    assert ", which does not fit." in out


def test_where_nothing_fits_the_reason_is_given(megatron: Any) -> None:
    code, out, _ = megatron(SCRIPT, "--cluster", "4xL4")

    assert code == 0
    assert "No plan fits: The model's states alone need" in out


def test_the_best_job_is_left_alone(megatron: Any, tmp_path: Path) -> None:
    planned = tmp_path / "planned.json"
    megatron(RECOMPUTING, "--cluster", "4xA100-80GB", "-o", str(planned))
    layout = json.loads(megatron(RECOMPUTING, "--cluster", "4xA100-80GB", "--json")[1])["changes"]
    new = next(change["then"] for change in layout if change["name"].endswith("layout"))
    _, out, _ = megatron(
        SCRIPT.replace("EXTRA", f"--pipeline-model-parallel-layout '{new}'"), "--cluster", "4xA100-80GB"
    )

    assert "Nothing faster was found." in out


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


def test_an_fsdp_job_changes_what_it_says_in_its_own_words(tmp_path: Path, json_of: Any) -> None:
    config = tmp_path / "llama3.toml"
    config.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
        '[parallelism]\ndata_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = "full"\n'
    )
    answer = json_of("import", "torchtitan", str(config), "--cluster", "8xH100-80GB", "--planner", "adapipe")
    assert answer["changes"] == [{"name": "activation_checkpoint.mode", "now": "full", "then": "none"}]


@pytest.mark.slow
def test_the_page_shows_what_an_import_answers(run: Any) -> None:
    text = (ROOT / "docs" / "imports.md").read_text()
    call, answer = re.findall(r"```\n(debubble import megatron .*?|pipeline 8, .*?)\n```", text, re.DOTALL)[:2]
    code, out, _ = run(*call.replace("examples/", f"{ROOT}/examples/").replace(" -o plan.json", "").split()[1:])

    assert code == 0
    head, *changes = answer.split("\n\n")[0].splitlines()
    assert " ".join(out.split()).startswith(head)
    assert [line for line in changes if line not in out] == []


def test_changes_to_megatron_fsdp_name_the_variable_that_they_need(megatron: Any) -> None:
    job = SCRIPT.replace("EXTRA", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    _, out, _ = megatron(job, "--cluster", "4xA100-80GB", "--degrees", "--effort", "0.2", "--json")
    changes = {change["name"]: change["then"] for change in json.loads(out)["changes"]}

    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in changes) == ("--use-megatron-fsdp" in changes)
    assert changes.get("CUDA_DEVICE_MAX_CONNECTIONS", "32") == "32"
