"""`debubble train --post-validation`: the same losses, reported when they are known."""

import json
import subprocess
from dataclasses import replace

import pytest

from debubble.ir import InputError, Kind, Op, Plan
from debubble.training import checkpoint_folder
from debubble.training.options import TrainOptions, validates_after
from debubble.training.run import train
from tests.training.test_train import TEXT, command


@pytest.fixture
def options(tmp_path, plan_file) -> TrainOptions:
    (tmp_path / "text.txt").write_text(TEXT)
    data = tmp_path / "text.txt"
    return TrainOptions(plan=plan_file(1), data=data, steps=14, warmup=2, learning_rate=0.01, clip=0.9)


def losses(outcome):
    return [report.loss for report in outcome.reports]


@pytest.mark.usefixtures("process_group")
def test_every_step_is_reported_once_and_in_order(options):
    outcome = train(replace(options, post_validation=True))
    assert [report.step for report in outcome.reports] == list(range(1, 15))
    assert losses(outcome) == losses(train(options))


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_has_settled_parameters(options, tmp_path):
    ahead = replace(options, post_validation=True, checkpoint=tmp_path / "c", save_every=7, keep=9)
    train(ahead)
    checkpoint_folder.latest(tmp_path / "c").rename(tmp_path / "later")
    assert losses(train(replace(ahead, resume=True))) == losses(train(options))[7:]


@pytest.mark.usefixtures("process_group")
def test_ranks_that_update_ahead_say_what_they_took_back(options, plan_file):
    """The last device's gradients are within the limit in the first step, all together are not."""
    short = replace(options, steps=4, clip=1.5)
    more = ["--clip", "1.5", "--steps", "4", "--post-validation", "--json"]
    ran = subprocess.run(command(replace(short, plan=plan_file(2)), *more), capture_output=True, text=True, check=True)
    ahead = json.loads(ran.stdout)
    assert ahead["losses"] == pytest.approx(losses(train(short)), rel=1e-5)
    assert ahead["rolled_back"] == [1]
    assert "step 1: the gradients' norm was 1.75: 1 device took the update back" in ran.stderr


def test_a_plan_that_steps_inside_the_step_needs_it(options):
    plan = Plan.load(options.plan)
    assert not validates_after(None, plan)
    stepping = replace(plan.schedule, orders=((*plan.schedule.orders[0], Op(Kind.S, 0, 3)),))
    inside = replace(plan, schedule=stepping)
    assert validates_after(None, inside)
    made_for_it = replace(plan, options=replace(plan.options, post_validation=True))
    assert validates_after(None, made_for_it)
    assert not validates_after(False, made_for_it)
    with pytest.raises(InputError, match="train it with --post-validation"):
        validates_after(False, inside)
