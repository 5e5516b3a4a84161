"""Runs with moving averages of the weights: validation, saving and resuming."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.training.checkpoint import folder as checkpoint_folder
from debubble.training.checkpoint.saver import Saver
from debubble.training.checkpoint.state import state_of
from debubble.training.checks import check
from debubble.training.options import TrainOptions
from debubble.training.resume import load
from tests.runtime.test_averages import DECAY, STEPS, plan_for, take_steps
from tests.runtime.test_pipeline import ADAMW
from tests.support.runtime_cases import LLAMA, plan_of, run_threads
from tests.support.training_cases import train_alone

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def options(options: TrainOptions) -> TrainOptions:
    validated = replace(options, validation=str(options.data), validate_every=1)
    return replace(validated, steps=4, warmup=1, learning_rate=0.05, ema_decay=DECAY)


def test_averages_are_resumed_under_another_layout(tmp_path: Path) -> None:
    def trained(pipeline: Any) -> Any:
        take_steps(pipeline)
        return state_of(pipeline)

    alone = plan_of(db.schedules["1f1b"](devices=1, micro_batches=4), LLAMA)
    (saved,) = run_threads(alone, trained, optimizer=ADAMW, ema_decay=DECAY)
    saver = Saver(tmp_path, keep=1)
    saver.save(saved, checkpoint_folder.RunProgress(step=STEPS, samples=0, seed=0, model=LLAMA))
    saver.wait()
    resumed = run_threads(plan_for(data=2, zero=2), state_of, optimizer=ADAMW, ema_decay=DECAY)
    for state in resumed:
        load(checkpoint_folder.latest(tmp_path), state)
    parts = [(name, piece) for state in resumed for name, piece in state.items() if name.startswith("average.")]
    assert {name for name, _ in parts} == {name for name in saved if name.startswith("average.")}
    for name, piece in parts:
        for block in piece.blocks:
            place = tuple(slice(a, a + n) for a, n in zip(block.offsets, block.size, strict=True))
            assert torch.equal(piece.block_view(block), saved[name].tensor[place]), name


def validated(options: TrainOptions) -> list[float | None]:
    return [report.validation_loss for report in train_alone(options).reports]


@pytest.mark.slow
def test_a_run_validates_its_averages_also_when_resumed(options: Any, tmp_path: Path) -> None:
    averaged, plain = validated(options), validated(replace(options, ema_decay=None))
    assert averaged[0] == plain[0]
    assert averaged[1:] != plain[1:]
    checkpoints = tmp_path / "checkpoints"
    train_alone(replace(options, checkpoint=checkpoints, save_every=2, keep=9))
    checkpoint_folder.latest(checkpoints).rename(tmp_path / "later")
    assert validated(replace(options, checkpoint=checkpoints, resume=True)) == averaged[2:]


def test_averages_begin_where_a_checkpoint_has_none(options: Any, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    plain = validated(replace(options, ema_decay=None))
    train_alone(replace(options, ema_decay=None, checkpoint=checkpoints, save_every=2, keep=9))
    checkpoint_folder.latest(checkpoints).rename(tmp_path / "later")
    resumed = validated(replace(options, checkpoint=checkpoints, resume=True))
    assert resumed[0] == plain[2]
    assert resumed[1] != plain[3]


def test_a_decay_beyond_its_bounds_is_refused(options: Any) -> None:
    with pytest.raises(InputError, match=r"--ema must lie between 0 and 1, not be 1\.5"):
        check(replace(options, ema_decay=1.5))


def test_averages_that_break_the_memory_limit_are_refused(options: Any, tmp_path: Path) -> None:
    plan = db.plan(db.Model.from_hf(LLAMA), db.Cluster.parse("2xA100-80GB"), micro_batches=2, planner="dapple")
    tight = replace(plan, costs=plan.costs.replace(memory_limit=max(plan.simulate().peak_memory)))
    tight.save(tmp_path / "tight.json")
    with pytest.raises(InputError, match=r"The averages of the weights need .* more than the plan has on device"):
        check(replace(options, plan=tmp_path / "tight.json", validation=None))
