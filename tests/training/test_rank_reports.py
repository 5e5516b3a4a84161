"""Which of several failures of ranks is reported as the first."""

from __future__ import annotations

import signal

import pytest

from debubble.runtime.launch.rank_reports import Reason, first_failure

ENDING = 5.0
"""Time at which the launcher began to end the ranks."""


def reason(moment: float, *, text: str = "RuntimeError: Connection reset by peer.", ended_by: str = "") -> Reason:
    doing = "sums the loss"
    return Reason(text=text, doing=doing, moment=moment, py_callstack="", ended_by=ended_by, of_run=False)


def sentence(exit_codes: dict[int, int], reasons: dict[int, Reason], requested: signal.Signals | None = None) -> str:
    return str(first_failure(exit_codes, reasons, ending=ENDING, requested=requested))


LOST, HUNG_UP = reason(1.0), reason(6.0, ended_by="SIGHUP")
BUG = "ValueError: no."


@pytest.mark.parametrize(
    ("codes", "reasons", "message"),
    [
        (
            {0: 1, 1: 1},
            {0: reason(2.0), 1: reason(1.0, text=BUG), 2: HUNG_UP},
            "Rank 1 failed: ValueError: no. (It sums the loss; rank 0 sums the loss; rank 2 sums the loss.)",
        ),
        (
            {0: 1, 1: -signal.SIGSEGV},
            {0: LOST},
            "Rank 1 was killed by SIGSEGV; rank 0 sums the loss; the other ranks were ended.",
        ),
        (
            {0: 1},
            {0: reason(2.0), 1: reason(1.0, ended_by="SIGTERM")},
            "Rank 1 was ended by SIGTERM; rank 0 sums the loss; the other ranks were ended.",
        ),
        ({0: 1}, {0: reason(2.0, text=BUG), 1: HUNG_UP}, "Rank 0 failed: ValueError: no. (It"),
        ({1: 7}, {}, "Rank 1 ended with exit code 7; the other ranks were ended."),
    ],
    ids=["the earliest error", "a killed rank", "a rank that was ended", "not what the launcher ended", "no word"],
)
def test_the_first_failure_is_the_cause(codes: dict[int, int], reasons: dict[int, Reason], message: str) -> None:
    assert sentence(codes, reasons).startswith(message)


@pytest.mark.parametrize("reasons", [{}, {1: reason(1.0, ended_by="SIGUSR1")}], ids=["at once", "with a reason"])
def test_ranks_that_end_on_request_end_the_run(reasons: dict[int, Reason]) -> None:
    codes = {0: -signal.SIGUSR1, 1: 1} if reasons else {0: -signal.SIGUSR1, 1: -signal.SIGUSR1}
    assert sentence(codes, reasons, signal.SIGUSR1) == "The run was ended by SIGUSR1, without a checkpoint."
