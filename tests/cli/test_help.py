"""Help in sections, names by their beginning, completion, and words while a command works."""

from __future__ import annotations

import json
import re
import time

import pytest
from typer.testing import CliRunner

import debubble as db
import debubble.cli.compare
import debubble.cli.export
import debubble.cli.fits
import debubble.cli.plan
import debubble.cli.planners
import debubble.cli.simulate
from debubble.cli import progress
from debubble.cli.app import app
from debubble.cli.names import device_names, export_names, model_names, optimizer_names, planner_names, schedule_names
from debubble.costs.step import MOMENTS
from debubble.exports import exports
from debubble.ir import InputError, RunOptions
from debubble.planners import planners
from debubble.planners.auto import fastest_of
from debubble.planners.model_problem import problem_of
from debubble.planners.progress import Progress, listening
from debubble.schedules import schedules


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_version_is_printed() -> None:
    assert said("--version") == f"debubble {db.__version__}\n"


def test_options_stand_under_titles() -> None:
    titles = re.findall(r"^(\S.*):$", said("plan", "--help"), re.MULTILINE)

    assert titles == [
        "Arguments", "The run of the MODEL", "What is asked", "Costs instead of a MODEL", "The search", "Output",
        "Options",
    ]  # fmt: skip


def test_commands_stand_under_titles() -> None:
    words = said("--help")

    assert re.findall(r"^(Plan|Look|Take along):$", words, re.MULTILINE) == ["Plan", "Look", "Take along"]


def test_a_command_is_called_by_a_beginning_that_no_other_has() -> None:
    assert json.loads(said("sim", "--schedule", "1f1b", "--devices", "2", "--json"))["devices"] == 2
    assert CliRunner().invoke(app, ["p"]).exit_code == 2


def test_a_name_is_completed_if_only_one_begins_so() -> None:
    assert planners.full_name("port") == "portfolio"
    assert schedules.full_name("zb") == "zb"
    with pytest.raises(InputError, match="There is no planner 'ada'"):
        planners.full_name("ada")


@pytest.mark.parametrize(("command", "names"), [("export", list(exports)), ("plan", list(MOMENTS))])
def test_help_names_the_choices(command: str, names: list[str]) -> None:
    words = " ".join(said(command, "--help").split())

    assert [name for name in names if name not in words] == []


def test_shells_complete_names() -> None:
    assert model_names("llama2-13") == ["llama2-13b"]
    assert device_names("16xL40") == ["16xL40S-48GB"]
    assert optimizer_names("adamw") == ["adamw", "adamw-8bit"]
    assert planner_names("meg") == ["megatron-even", "megatron-kwai"]
    assert schedule_names("zb-h") == ["zb-h1", "zb-h2"]
    assert export_names("to") == ["torch", "torchtitan"]


def test_planning_tells_how_many_planners_have_answered() -> None:
    seen: list[Progress] = []
    problem = problem_of(db.models["llama-tiny"], db.Cluster.parse("2xA100-80GB"), RunOptions(), micro_batches=2)

    with listening(seen.append):
        fastest_of(problem, ["dapple", "adapipe", "pipedream"])

    assert [(p.done, p.total, p.counted) for p in seen] == [(n, 3, "planners") for n in (1, 2, 3)]
    times = [p.step_time for p in seen if p.step_time is not None]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)


def test_a_command_that_takes_long_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)

    @progress.told_after_a_while("Counting")
    def command() -> None:
        while "Counting ..." not in capsys.readouterr().err:
            time.sleep(0.001)

    command()
