"""Throughputs that ChronosPipe states, under every model of how its messages behave."""

from __future__ import annotations

from collections.abc import Mapping

from debubble.ir.stage_costs import CommunicationModel
from debubble.papers.chronospipe.figures.memory_model import ALL, CHRONOS, FULL, HALF, MESSAGE, PLAIN, RECOMP, Method
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Table

PAPER = PrintedPaper.of("chronospipe")

MESSAGES: Mapping[CommunicationModel, str] = {
    "blocking": "with blocking messages",
    "receiver": "where the receiver waits",
    "latency": "with asynchronous ones",
}
"""Models of messages.  In the middle one the receiver waits from when it asks for the message, with a
recomputation next to it, and the sender continues; section 4.2 argues so for the gradients of chunk 2."""


def throughputs(method: Method, reference: Method, p: int, m: int) -> dict[CommunicationModel, float]:
    """A method's throughput as a share of another's, by what its messages do."""
    return {
        model: float(reference.run(p, m, message=MESSAGE, model=model).makespan)
        / float(method.run(p, m, message=MESSAGE, model=model).makespan)
        for model in MESSAGES
    }


def throughput(method: Method, reference: Method, p: int, m: int) -> str:
    """Say what a method's throughput is of another's, by what its messages do."""
    shares = throughputs(method, reference, p, m)
    *first, last = (f"{100 * shares[model]:.1f}% {words}" for model, words in MESSAGES.items())
    return (
        f"{method.name} has, of {reference.name}'s, {', '.join(first)} and {last} (PP{p}, m = {m}, T_c = 0.104 T_unit)."
    )


COMPARED = (
    ("9a", ALL, HALF, 8, 64, "97.58"),
    ("10", RECOMP, FULL, 8, 32, "about 117"),
    ("11", CHRONOS, PLAIN, 4, 32, "91 to 94"),
    ("11", RECOMP, HALF, 4, 32, "comparable"),
    ("12", RECOMP, HALF, 8, 64, "similar"),
    ("12", RECOMP, FULL, 8, 64, "about 115"),
    ("13", CHRONOS, PLAIN, 4, 64, "about 94 (6 points)"),
    ("13", RECOMP, HALF, 4, 64, "at least 97 (3 points)"),
)
"""Figure, method, what it is compared with, p, m, and the paper's percentage."""


def message_models() -> Table:
    """The throughputs of Figures 9a, 11, 12 and 13 under every model of messages."""
    rows: list[tuple[Cell, ...]] = []
    for figure, method, reference, p, m, paper in COMPARED:
        shares = throughputs(method, reference, p, m)
        ours = (round(100 * shares[model], 1) for model in MESSAGES)
        rows.append((figure, method.name, reference.name, f"PP{p}, m = {m}", paper, *ours))
    return PAPER.table("message-models", rows)
