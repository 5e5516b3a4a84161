"""The reports of failing ranks to their launcher, and the choice of the first failure."""

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
"""Maximum number of other ranks whose activity an error message shows."""


class RankFailedError(DebubbleError):
    """A rank died or raised; the message says which one and why."""


class InterruptedRunError(RankFailedError):
    """The run ended after a Ctrl-C."""

    exit_code = INTERRUPTED


class Reason(msgspec.Struct, frozen=True):
    """The report of a rank that failed (see `runtime.launch.failures.report_failure`)."""

    text: str
    doing: str
    moment: float
    """On the machine's monotonic clock, in seconds."""
    py_callstack: str
    ended_by: str
    """The signal that ended the rank; empty if it failed."""
    of_run: bool


def reasons_in(folder: Path) -> dict[int, Reason]:
    """The reports in the launcher's folder, by rank."""
    reasons = {}
    for file in folder.glob("*/error.json"):
        details = json.loads(file.read_bytes())["message"]["extraInfo"]
        reasons[int(file.parent.name)] = msgspec.convert(details, Reason)
    return reasons


def first_failure(
    exit_codes: Mapping[int, int], reasons: Mapping[int, Reason], *, ending: float, requested: signal.Signals | None
) -> RankFailedError:
    """The first failure: a rank killed by a signal, else the earliest report.

    Ranks that lose a peer fail too, often before the launcher has noticed the cause.

    Args:
        exit_codes: Exit codes of ranks that ended before the launcher began to end the others; negative for a signal.
        reasons: Reports by rank.
        ending: When the launcher began to end the others, on the monotonic clock.
        requested: The signal that requested the launcher to end the run, if any.
    """
    of_run = [reason for reason in reasons.values() if reason.of_run]
    if of_run:
        # Later reports may be consequences of the first.
        return RankFailedError(min(of_run, key=lambda reason: reason.moment).text)
    # A report from before the launcher's signal is a cause, even if the rank has not exited yet.
    causes = {rank: r for rank, r in reasons.items() if not r.ended_by or r.moment < ending}
    killed = [rank for rank, code in exit_codes.items() if code < 0 and rank not in causes]
    if requested is not None and (
        any(exit_codes[rank] == -requested for rank in killed) or any(r.ended_by for r in causes.values())
    ):
        return RankFailedError(f"The run was ended by {requested.name}, without a checkpoint.")
    without_reason = [*killed, *(rank for rank in exit_codes if rank not in causes)]
    if killed or not causes:
        rank = without_reason[0]
        activity = _peer_activity(reasons, rank)
        code = exit_codes[rank]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankFailedError(f"Rank {rank} {how}{activity}; the other ranks were ended.")
    rank = min(causes, key=lambda cause: causes[cause].moment)
    reason, activity = causes[rank], _peer_activity(reasons, rank)
    if reason.ended_by:
        return RankFailedError(f"Rank {rank} was ended by {reason.ended_by}{activity}; the other ranks were ended.")
    sys.stderr.write(reason.py_callstack)
    doing = f" (It {reason.doing}{activity}.)" if reason.doing else ""
    return RankFailedError(f"Rank {rank} failed: {reason.text}{doing}")


def stopped_rank(rank: int, reasons: Mapping[int, Reason], *, seconds: float) -> RankFailedError:
    """The failure of a rank that was stopped by a signal for `seconds`."""
    activity = _peer_activity(reasons, rank)
    return RankFailedError(
        f"Rank {rank} was stopped by a signal and has not gone on for {seconds:g} s{activity}; the other ranks were"
        " ended."
    )


def _peer_activity(reasons: Mapping[int, Reason], failed: int) -> str:
    doing = [f"; rank {rank} {r.doing}" for rank, r in sorted(reasons.items()) if r.doing and rank != failed]
    return "".join(doing[:MAX_RANKS_SHOWN])
