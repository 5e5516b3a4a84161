"""Another distribution adds members to every registry through entry points."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from debubble.processes import PYTHON

MEMBERS = {
    "schedules": """
from debubble.ir import Kind, Op, Placement, Schedule
from debubble.schedules.registry import schedule

@schedule("mine", paper="none", bubble="all", memory="m")
def mine(*, devices, micro_batches, costs=None):
    order = lambda d: tuple(Op(kind, d, j) for kind in (Kind.F, Kind.B) for j in range(micro_batches))
    orders = tuple(order(d) for d in range(devices))
    return Schedule(name="mine", placement=Placement.linear(devices), micro_batches=micro_batches, orders=orders)
""",
    "planners": """
from debubble.planners import planners
from debubble.planners.registry import planner

@planner("mine", paper="none")
def mine(problem):
    '''The answer of dapple.'''
    return planners["dapple"].find(problem)
""",
    "targets": """
from debubble.targets import Target, targets

targets.add("mine", Target(name="mine", title="Mine"))
""",
    "exports": """
from dataclasses import fields
from debubble.exports.registry import ExportDraft, exporter
from debubble.ir import RunOptions

@exporter("mine", options={field.name: lambda plan: {} for field in fields(RunOptions)})
def mine(plan, settings):
    return ExportDraft(files={"mine.txt": plan.schedule.name}, runs=plan)
""",
    "views": """
from debubble.views.registry import view

@view("mine")
def mine(scenes):
    return f"{len(scenes)} scene".encode()
""",
    "costs": """
from dataclasses import replace
from debubble.costs import hardware

hardware.add("MINE", replace(hardware["A100-80GB"], name="MINE"))
""",
    "models": """
from debubble.models import ModelConfig, models

models.add("mine", ModelConfig.from_hf({**models["llama-tiny"].config, "num_hidden_layers": 6}))
""",
}
SCRIPT = """
import debubble as db
from debubble.exports import exports
from debubble.views import Scene, views

model, cluster = db.models["mine"], db.Cluster.parse("2xMINE")
plan = db.plan(model, cluster, micro_batches=2, sequence_length=128, planner="mine", target="mine")
print(model.layers, plan.planner, plan.target)
print(db.schedules["mine"](devices=2, micro_batches=2).orders[1][-1].name)
print(exports["mine"](plan).files["mine.txt"], views["mine"]([Scene.predicted(plan)]).decode())
"""


FAILING = {
    "schedules": """
from debubble.schedules.registry import schedule

@schedule("mine", paper="none", bubble="all", memory="m")
def mine(*, devices, micro_batches, costs=None):
    return 1 // (devices - devices)
""",
    "planners": """
from debubble.planners.registry import planner

@planner("mine", paper="none")
def mine(problem):
    assert problem.devices > 8
""",
}


def run(members: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a distribution that adds these members."""
    described = folder / "mine-1.0.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = [f"[debubble.{group}]\nmine = mine_{group}\n" for group in members]
    (described / "entry_points.txt").write_text("".join(groups))
    for group, source in members.items():
        (folder / f"mine_{group}.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([*PYTHON, *arguments], env=environment, capture_output=True, text=True)


def test_distribution_adds_a_member_to_every_registry(tmp_path: Path) -> None:
    done = run(MEMBERS, tmp_path, "-c", SCRIPT)

    assert done.stdout == "6 mine mine\n1B1\n1f1b 1 scene\n", done.stderr


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        pytest.param(
            "simulate --schedule mine --devices 2",
            "The schedule 'mine' fails at mine_schedules.py, line 6 (ZeroDivisionError: integer division or modulo by"
            " zero).",
            marks=pytest.mark.slow,
        ),
        (
            "plan llama-tiny --cluster 2xA100-80GB --planner mine",
            "The planner 'mine' fails at mine_planners.py, line 6 (AssertionError).",
        ),
    ],
)
def test_a_member_that_fails_is_named_in_a_sentence(call: str, sentence: str, tmp_path: Path) -> None:
    done = run(FAILING, tmp_path, "-m", "debubble", *call.split())

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == f"debubble: {sentence}"


@pytest.mark.slow
def test_failing_members_do_not_stop_other_planners(tmp_path: Path) -> None:
    script = """
import debubble as db
plan = db.plan("llama-tiny", "2xA100-80GB", micro_batches=2, sequence_length=128, effort=0.1)
rejected = {c.planner: c.rejected for c in plan.candidates}
print(rejected["mine"], rejected["portfolio"])
print(next(c.remark for c in plan.candidates if c.planner == "portfolio"))
"""
    done = run(FAILING, tmp_path, "-c", script)

    of_planner, of_schedule = done.stdout.splitlines()
    assert of_planner == "The planner 'mine' fails at mine_planners.py, line 6 (AssertionError). None", done.stderr
    assert of_schedule.startswith("mine: The schedule 'mine' fails at mine_schedules.py, line 6 (ZeroDivisionError")


def test_a_member_without_a_docstring_is_listed(tmp_path: Path) -> None:
    done = run(FAILING, tmp_path, "-m", "debubble", "planners")
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
