"""A run that a scheduler asks to end writes a checkpoint, from which it can be resumed."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from debubble.runtime.launch.failures import RunError
from debubble.training.end_request import EndRequest
from debubble.training.options import TrainOptions
from tests.support.training_cases import train_alone

STEPS = 12


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("wait", "answers"), [(True, [None, 15, 15]), (False, [None, None, 15])])
def test_ranks_agree_after_a_step_or_after_the_next(wait: bool, answers: list[int | None]) -> None:
    request = EndRequest(wait=wait)
    heard = [request.agreed()]
    request.receive(signal.SIGTERM)
    heard += [request.agreed(), request.agreed()]
    assert heard == answers


class Signalling:
    """Samples whose 16th sends a signal to the rank."""

    def __init__(self, number: signal.Signals | None) -> None:
        self._number, self._made = number, 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> list[int]:
        self._made += 1
        if self._made == 16 and self._number is not None:
            rank = multiprocessing.parent_process()
            assert rank is not None
            assert rank.pid is not None
            os.kill(rank.pid, self._number)
        return [(index + place * place) % 256 for place in range(33)]


@pytest.mark.usefixtures("process_group", "forked_processes")
@pytest.mark.parametrize(
    ("number", "post_validation"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM"),
        pytest.param(signal.SIGINT, True, id="Ctrl-C, validated afterwards", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_written_on_request(
    tmp_path: Path, plan_file: Callable[[int], Path], number: signal.Signals, post_validation: bool
) -> None:
    options = TrainOptions(plan=plan_file(1), steps=STEPS, post_validation=post_validation)
    saving = replace(options, checkpoint=tmp_path / "c", save_every=STEPS)
    with pytest.raises(RunError) as ended:
        train_alone(saving, dataset=Signalling(number))
    sentence = (
        r"The run was stopped by a signal after step (\d+) of 12: go on from (.*) by the same call with --resume\."
    )
    match = re.fullmatch(sentence, str(ended.value))
    assert match is not None
    done = int(match[1])
    assert Path(match[2]) == tmp_path / "c" / f"step-{done:06d}"
    resumed = train_alone(replace(saving, resume=True), dataset=Signalling(None))
    uninterrupted = train_alone(options, dataset=Signalling(None))
    assert [r.loss for r in resumed.reports] == [r.loss for r in uninterrupted.reports][done:]
