"""Which of the ranks' failures came first."""

from __future__ import annotations

import signal

import pytest

from debubble.runtime.launch.rank_reports import Reason, first_failure

ENDING = 5.0
"""When the launcher began to end the ranks."""


def reason(moment: float, *, text: str = "RuntimeError: Connection reset by peer.", ended_by: str = "") -> Reason:
    doing = "sums the loss"
    return Reason(text=text, doing=doing, moment=moment, py_callstack="", ended_by=ended_by, of_run=False)


def sentence(exit_codes: dict[int, int], reasons: dict[int, Reason], requested: signal.Signals | None = None) -> str:
    return str(first_failure(exit_codes, reasons, ending=ENDING, requested=requested))


def test_the_earliest_error_is_the_cause() -> None:
    reasons = {0: reason(2.0), 1: reason(1.0, text="ValueError: no."), 2: reason(6.0, ended_by="SIGHUP")}
    assert sentence({0: 1, 1: 1}, reasons) == (
        "Rank 1 failed: ValueError: no. (It sums the loss; rank 0 sums the loss; rank 2 sums the loss.)"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_rank_comes_before_those_that_lost_it(number: signal.Signals) -> None:
    assert sentence({0: 1, 1: -number}, {0: reason(1.0)}) == (
        f"Rank 1 was killed by {number.name}; rank 0 sums the loss; the other ranks were ended."
    )


def test_a_rank_that_sigterm_ended_is_the_cause_of_what_followed() -> None:
    reasons = {0: reason(2.0), 1: reason(1.0, ended_by="SIGTERM")}
    assert sentence({0: 1}, reasons) == (
        "Rank 1 was ended by SIGTERM; rank 0 sums the loss; the other ranks were ended."
    )


def test_what_the_launcher_ended_is_no_cause() -> None:
    reasons = {0: reason(2.0, text="ValueError: no."), 1: reason(6.0, ended_by="SIGHUP")}
    assert sentence({0: 1}, reasons).startswith("Rank 0 failed: ValueError: no.")


def test_a_rank_that_says_nothing_has_its_exit_code() -> None:
    assert sentence({1: 7}, {}) == "Rank 1 ended with exit code 7; the other ranks were ended."


@pytest.mark.parametrize("reasons", [{}, {1: reason(1.0, ended_by="SIGUSR1")}], ids=["at once", "with a reason"])
def test_ranks_that_end_on_request_are_the_runs_end(reasons: dict[int, Reason]) -> None:
    codes = {0: -signal.SIGUSR1, 1: 1} if reasons else {0: -signal.SIGUSR1, 1: -signal.SIGUSR1}
    assert sentence(codes, reasons, signal.SIGUSR1) == "The run was ended by SIGUSR1."
