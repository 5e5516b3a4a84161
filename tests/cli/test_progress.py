"""What a search shows while it goes on."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from debubble.cli.output import LONG_PAUSE, PAUSE, SearchProgress
from debubble.planners.progress import Progress


def state(stage: str, *, best: str | None = None, step: float | None = None) -> Progress:
    return Progress(stage=stage, done=1, total=3, counted="planners", best=best, step_time=step)


def test_the_best_so_far_stays_until_there_is_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("debubble.cli.output.log", lambda: Console(force_terminal=True, quiet=True))
    shown: list[str] = []
    status: Any = Console(quiet=True).status("")
    monkeypatch.setattr(status, "update", shown.append)
    show = SearchProgress(status)

    show(state("Ranking", best="dapple", step=2.0))
    show(state("Planning"))
    show(state("Planning", best="merak", step=3.0))
    show(state("Planning", best="joint", step=1.5))

    assert shown == [
        "Ranking: 1 of 3 planners, best so far 2 s (dapple)",
        "Planning: 1 of 3 planners, best so far 2 s (dapple)",
        "Planning: 1 of 3 planners, best so far 2 s (dapple)",
        "Planning: 1 of 3 planners, best so far 1.5 s (joint)",
    ]


def test_piped_progress_is_a_line_per_stage_and_better_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = 0.0
    monkeypatch.setattr("debubble.cli.output.time.monotonic", lambda: clock)
    show = SearchProgress(Console(quiet=True).status(""))

    for _ in range(20):
        clock += LONG_PAUSE / 20
        show(state("Ranking"))
    for step in (2.0, 1.9, 1.9, 1.8):
        clock += PAUSE / 2
        show(state("Planning", best="joint", step=step))

    assert capsys.readouterr().err.splitlines() == [
        "Ranking: 1 of 3 planners",
        "Planning: 1 of 3 planners, best so far 2 s (joint)",
        "Planning: 1 of 3 planners, best so far 1.9 s (joint)",
    ]
