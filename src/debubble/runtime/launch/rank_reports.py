"""The reasons that failing ranks leave for their launcher, and which of them is the first failure."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from debubble.interrupts import INTERRUPTED
from debubble.ir import DebubbleError

MAX_RANKS_SHOWN = 4
"""Ranks of which an error tells what they were doing."""


class RankFailedError(DebubbleError):
    """A rank died or raised; the sentence says which one and why."""


class InterruptedRunError(RankFailedError):
    """The run has ended after a Ctrl-C."""

    exit_code = INTERRUPTED


class Reason(msgspec.Struct, frozen=True):
    """The reports that ranks write when they end (see `runtime.launch.failures.report_failure`)."""

    text: str
    doing: str
    moment: float
    """On the machine's monotonic clock, in seconds."""
    py_callstack: str
    ended_by: str
    """The signal that ended the rank; empty: it failed."""
    of_run: bool


def reasons_in(folder: Path) -> dict[int, Reason]:
    """The reason of each rank that has left one in its part of the launcher's folder."""
    reasons = {}
    for file in folder.glob("*/error.json"):
        details = json.loads(file.read_bytes())["message"]["extraInfo"]
        reasons[int(file.parent.name)] = msgspec.convert(details, Reason)
    return reasons


def first_failure(
    exit_codes: Mapping[int, int], reasons: Mapping[int, Reason], *, ending: float, requested: signal.Signals | None
) -> RankFailedError:
    """The failure that came first: a rank killed by a signal, else the earliest reason.

    The ranks that lose a peer fail too, often before the launcher has noticed the cause.

    Args:
        exit_codes: Of the ranks that ended before the launcher began to end the others; negative: the signal's number.
        reasons: By rank.
        ending: When the launcher began to end the others, on the monotonic clock.
        requested: The signal with which the launcher was asked to end the run.
    """
    of_run = [reason for reason in reasons.values() if reason.of_run]
    if of_run:
        # A later one has found the first one gone.
        return RankFailedError(min(of_run, key=lambda reason: reason.moment).text)
    # A reason that is older than the launcher's own signal is a cause, also if the rank has not exited yet.
    causes = {rank: r for rank, r in reasons.items() if not r.ended_by or r.moment < ending}
    killed = [rank for rank, code in exit_codes.items() if code < 0 and rank not in causes]
    if requested is not None and (
        any(exit_codes[rank] == -requested for rank in killed) or any(r.ended_by for r in causes.values())
    ):
        return RankFailedError(f"The run was ended by {requested.name}, without a checkpoint.")
    without_reason = [*killed, *(rank for rank in exit_codes if rank not in causes)]
    if killed or not causes:
        rank = without_reason[0]
        others = _others(reasons, rank)
        code = exit_codes[rank]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankFailedError(f"Rank {rank} {how}{others}; the other ranks were ended.")
    rank = min(causes, key=lambda each: causes[each].moment)
    reason, others = causes[rank], _others(reasons, rank)
    if reason.ended_by:
        return RankFailedError(f"Rank {rank} was ended by {reason.ended_by}{others}; the other ranks were ended.")
    sys.stderr.write(reason.py_callstack)
    doing = f" (It {reason.doing}{others}.)" if reason.doing else ""
    return RankFailedError(f"Rank {rank} failed: {reason.text}{doing}")


def stopped_rank(rank: int, reasons: Mapping[int, Reason], *, seconds: float) -> RankFailedError:
    """The failure of a rank that a signal has stopped, and that has not gone on for so long."""
    return RankFailedError(
        f"Rank {rank} was stopped by a signal and has not gone on for {seconds:g} s{_others(reasons, rank)}; the other"
        " ranks were ended."
    )


def _others(reasons: Mapping[int, Reason], failed: int) -> str:
    doing = [f"; rank {rank} {r.doing}" for rank, r in sorted(reasons.items()) if r.doing and rank != failed]
    return "".join(doing[:MAX_RANKS_SHOWN])
