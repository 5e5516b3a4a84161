"""Resuming from every checkpoint that a run writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from debubble.training.options import TrainOptions
from tests.support.training_cases import train_alone

pytestmark = pytest.mark.usefixtures("process_group")

STEPS = 9


@pytest.fixture
def options(tmp_path: Path, plan_file: Callable[[int], Path]) -> TrainOptions:
    (tmp_path / "text.txt").write_text("".join(f"{i} green bottles, hanging on the wall;\n" for i in range(200)))
    return TrainOptions(plan=plan_file(1), data=tmp_path / "text.txt", warmup=2, steps=STEPS)


def losses(options: TrainOptions, **changes: Any) -> list[float]:
    return [report.loss for report in train_alone(replace(options, **changes)).reports]


@pytest.mark.parametrize("interval", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_any_checkpoint_of_a_run_is_resumed(options: TrainOptions, tmp_path: Path, interval: int) -> None:
    folder = tmp_path / "c"
    whole = losses(options, checkpoint=folder, save_every=interval, keep=99)
    saved = sorted(folder.glob("step-*"))
    assert [int(p.name[5:]) for p in saved] == [*range(interval, STEPS, interval), STEPS]
    for checkpoint in saved:
        alone = tmp_path / f"resumed-{checkpoint.name}"
        shutil.copytree(checkpoint, alone / checkpoint.name)
        done = int(checkpoint.name[5:])
        if done < STEPS:
            assert losses(options, checkpoint=alone, save_every=99, resume=True) == whole[done:]


def test_the_checkpoint_at_a_runs_end_is_resumed(options: TrainOptions, tmp_path: Path) -> None:
    losses(options, checkpoint=tmp_path / "c", steps=4, lr_schedule="constant")
    resumed = losses(options, checkpoint=tmp_path / "c", resume=True, lr_schedule="constant")
    assert resumed == losses(options, lr_schedule="constant")[4:]
