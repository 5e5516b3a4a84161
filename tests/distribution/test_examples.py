"""The examples run, and their SLURM and Kubernetes files call real commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from debubble.cli.app import with_all_commands
from debubble.errors import InputError
from tests.support.command_line import check_call

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, folder: Path) -> str:
    call = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_model_is_planned_in_a_few_lines(tmp_path: Path) -> None:
    assert "device 3: " in run("plan_a_model.py", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "plan.html"}


def test_custom_schedule_is_simulated_next_to_1f1b(tmp_path: Path) -> None:
    printed = run("own_schedule.py", tmp_path)

    assert printed.splitlines() == [
        "1f1b: 41.0 per step, memory (4, 3, 2, 1)",
        "eager-1f1b: 37.0 per step, memory (5, 4, 3, 1)",
    ]


@pytest.mark.slow
def test_custom_planner_answers_and_adapipe_is_no_slower(tmp_path: Path) -> None:
    printed = dict(line.split(": ") for line in run("own_planner.py", tmp_path).splitlines())

    random_stages, adapipe = (float(printed[name].removesuffix(" s")) for name in ("random-stages", "adapipe"))
    assert adapipe <= random_stages


@pytest.mark.parametrize(
    "call", ["megatron examples/jobs/pretrain_llama3_8b.sh", "torchtitan examples/jobs/llama3_8b.toml"]
)
def test_a_job_of_another_framework_is_read_as_it_is(call: str) -> None:
    words = ["import", *call.split(), "--cluster", "8xA100-40GB", "--as-it-is", "--json"]
    words[2] = str(ROOT / words[2])
    answer = json.loads(CliRunner().invoke(with_all_commands(), words).stdout)

    assert answer["degrees"]["pipeline"] == 8
    assert answer["yours"]["step_time"] > 0


def test_the_slurm_script_is_a_script_and_its_call_is_right() -> None:
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)

    call = re.search(r"-m debubble (.*)", script.read_text())
    assert call
    check_call(shlex.split(call[1]))


def test_the_kubernetes_jobs_call_is_right() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]

    assert container["command"] == ["torchrun"]
    assert container["args"][:2] == ["-m", "debubble"]
    check_call(container["args"][2:])


def test_container_file_names_existing_files_and_extras() -> None:
    words = (ROOT / "Containerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", words, re.MULTILINE) for name in line.split()]
    [extras] = re.findall(r"\.whl\)\[(.*?)\]", words)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert copied == ["pyproject.toml", "README.md", "LICENSE", "src"]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert {Path(project["readme"]).name, *project["license-files"]} <= set(copied)
    assert re.findall(r'ENTRYPOINT \["(.*)"\]', words) == list(project["scripts"])


def test_wrong_call_would_be_detected() -> None:
    with pytest.raises(InputError, match="There is no option '--dta'; did you mean '--data'"):
        check_call(["train", "plan.json", "--dta", "text"])
