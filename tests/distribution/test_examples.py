"""The examples run, and what they give to SLURM and Kubernetes is called correctly."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from debubble.cli.app import with_all_commands
from debubble.cli.help import CommandGroup

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path) -> str:
    call = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, check=True).stdout


def check_call(words: list[str]) -> None:
    """Let the command line read a call of `debubble`; raises for what it does not know."""
    group = typer.main.get_command(with_all_commands())
    assert isinstance(group, CommandGroup)
    context = typer.Context(group)
    name, called, rest = group.resolve_command(context, words)
    assert called is not None
    called.make_context(name, rest, parent=context)


def test_a_model_is_planned_in_a_few_lines(tmp_path: Path) -> None:
    assert "device 3: " in run("plan_a_model.py", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "plan.html"}


def test_a_schedule_of_ones_own_is_simulated_beside_1f1b(tmp_path: Path) -> None:
    printed = run("own_schedule.py", tmp_path)

    assert printed.splitlines() == [
        "1f1b: 41.0 per step, memory (4, 3, 2, 1)",
        "eager-1f1b: 37.0 per step, memory (5, 4, 3, 1)",
    ]


def test_a_planner_of_ones_own_answers_and_adapipe_is_no_slower(tmp_path: Path) -> None:
    printed = dict(line.split(": ") for line in run("own_planner.py", tmp_path).splitlines())

    own, adapipe = (float(printed[name].removesuffix(" s")) for name in ("random-stages", "adapipe"))
    assert adapipe <= own


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


def test_a_wrong_call_would_be_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        check_call(["train", "plan.json", "--dta", "text"])
