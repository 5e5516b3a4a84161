"""Throughputs that ChronosPipe states, under every model of P2P communication."""

from __future__ import annotations

from collections.abc import Mapping

from debubble.ir.stage_costs import CommunicationModel
from debubble.papers.chronospipe.figures.memory_model import ALL, CHRONOS, FULL, HALF, MESSAGE, PLAIN, RECOMP, Method
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Table

PAPER = PrintedPaper.load("chronospipe")

MESSAGES: Mapping[CommunicationModel, str] = {
    "blocking": "with blocking messages",
    "receiver": "where the receiver waits",
    "latency": "with asynchronous ones",
}
"""Communication model -> its description.  With `receiver` the sender continues and the receiver waits from its
receive on, overlapped with recomputation, as section 4.2 argues for the gradients of chunk 2."""


def throughputs(method: Method, reference: Method, p: int, m: int) -> dict[CommunicationModel, float]:
    """Communication model -> a method's throughput relative to a reference."""
    return {
        model: float(reference.run(p, m, message=MESSAGE, model=model).makespan)
        / float(method.run(p, m, message=MESSAGE, model=model).makespan)
        for model in MESSAGES
    }


def throughput(method: Method, reference: Method, p: int, m: int) -> str:
    """A sentence with a method's throughput relative to a reference under every communication model."""
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
"""Figure, method, reference, p, m, and the paper's percentage."""


def message_models() -> Table:
    """The throughputs of Figures 9a, 11, 12 and 13 under every communication model."""
    rows: list[tuple[Cell, ...]] = []
    for figure, method, reference, p, m, paper in COMPARED:
        shares = throughputs(method, reference, p, m)
        ours = (round(100 * shares[model], 1) for model in MESSAGES)
        rows.append((figure, method.name, reference.name, f"PP{p}, m = {m}", paper, *ours))
    return PAPER.table("message-models", rows)
