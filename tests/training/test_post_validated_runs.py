"""`debubble train --post-validation` has the same losses, reported when they are final."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError, Kind, Op
from debubble.plans import Plan
from debubble.training.checkpoint import folder as checkpoint_folder
from debubble.training.checks import validates_after
from debubble.training.options import TrainOptions
from tests.support.training_cases import train_alone
from tests.training.test_train import arguments

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def options(options: TrainOptions) -> TrainOptions:
    return replace(options, steps=8, clip=0.9)


def losses(outcome: Any) -> Any:
    return [report.loss for report in outcome.reports]


def test_every_step_is_reported_once_and_in_order(options: Any) -> None:
    outcome = train_alone(replace(options, post_validation=True))
    assert [report.step for report in outcome.reports] == list(range(1, 9))
    assert losses(outcome) == losses(train_alone(options))


def test_a_checkpoint_has_settled_parameters(options: Any, tmp_path: Path) -> None:
    ahead = replace(options, post_validation=True, checkpoint=tmp_path / "c", save_every=4, keep=9)
    train_alone(ahead)
    checkpoint_folder.latest(tmp_path / "c").rename(tmp_path / "later")
    assert losses(train_alone(replace(ahead, resume=True))) == losses(train_alone(options))[4:]


def test_ranks_report_updates_that_they_rolled_back(options: Any, train: Any, plan_file: Any) -> None:
    """In the first step the last device's gradients are within the limit, but all together are not."""
    short = replace(options, steps=4, clip=1.5)
    more = ["--clip", "1.5", "--steps", "4", "--post-validation", "--json"]
    code, answer, error = train(*arguments(replace(short, plan=plan_file(2)), *more))
    assert code == 0, error
    ahead = json.loads(answer)
    assert ahead["losses"] == pytest.approx(losses(train_alone(short)), rel=1e-5)
    assert ahead["rolled_back"] == [1]
    assert "step 1: the gradients' norm 1.75 is clipped: 1 device took the update back and repeated it" in error


def post_validated(plan: Any) -> Any:
    return replace(plan, options=replace(plan.options, post_validation=True))


def test_devices_validate_afterwards_where_copies_are_planned(options: Any) -> None:
    plan = Plan.load(options.plan)
    assert not validates_after(None, plan)
    assert validates_after(None, post_validated(plan))
    assert not validates_after(False, post_validated(plan))
    [order] = plan.schedule.orders
    hosted = replace(plan.schedule, orders=((Op(Kind.P, 0, 0), *order, Op(Kind.D, 0, 3), Op(Kind.S, 0, 3)),))
    assert not validates_after(None, replace(plan, schedule=hosted))  # Plans with steps only on hosts need no copies.


def test_plan_with_inner_device_steps_needs_post_validation(options: Any) -> None:
    plan = Plan.load(options.plan)
    stepping = replace(plan.schedule, orders=((*plan.schedule.orders[0], Op(Kind.S, 0, 3)),))
    inside = replace(plan, schedule=stepping)
    assert validates_after(None, post_validated(inside))
    for wanted in (None, False):
        with pytest.raises(InputError, match="steps stage 0 on its device before"):
            validates_after(wanted, inside)


def test_rollback_copies_without_memory_are_refused() -> None:
    def plan(**limit: Any) -> Any:
        return db.plan(
            db.models["llama-tiny"], db.Cluster.parse("2xCPU"), planner="dapple", sequence_length=128, dtype="fp32",
            micro_batches=4, **limit,
        )  # fmt: skip

    assert validates_after(True, plan())
    limit = int(max(plan().simulate().peak_memory)) + 1
    with pytest.raises(InputError, match="The copies that take updates back need"):
        validates_after(True, plan(memory_limit=limit))
