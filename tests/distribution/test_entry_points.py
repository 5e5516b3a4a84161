"""Another distribution adds to every room by entry points alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

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
from debubble.exports.options import Written
from debubble.exports.registry import Made, exporter
from debubble.ir import RunOptions

@exporter("mine", options={field.name: lambda plan: Written({}) for field in fields(RunOptions)})
def mine(plan, settings):
    return Made(files={"mine.txt": plan.schedule.name}, runs=plan)
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


def test_a_distribution_adds_a_member_to_every_room(tmp_path: Path) -> None:
    described = tmp_path / "mine-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = [f"[debubble.{room}]\nmine = mine_{room}\n" for room in MEMBERS]
    (described / "entry_points.txt").write_text("".join(groups))
    for room, source in MEMBERS.items():
        (tmp_path / f"mine_{room}.py").write_text(source)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*PYTHON, "-c", SCRIPT], env=environment, capture_output=True, text=True)

    assert done.stdout == "6 mine mine\n1B1\n1f1b 1 scene\n", done.stderr
