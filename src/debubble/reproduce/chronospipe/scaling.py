"""ChronosPipe's Figures 13 to 16: messages, scaling of the offload, recomputation and offload of more chunks."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.reproduce.chronospipe import schedules
from debubble.reproduce.chronospipe.memory_model import CHRONOS, HALF, PLAIN, RECOMP
from debubble.reproduce.claims import compared, holds, stated
from debubble.reproduce.drawings import Bars, Lines
from debubble.reproduce.registry import Exhibit, number


def figure_13() -> Iterator[Exhibit]:
    """Messages."""
    table = schedules.figure_13()
    rows = {row[0]: row[1:] for row in table.cells}
    plain, chronos, half, recomp = (rows[each.name] for each in (PLAIN, CHRONOS, HALF, RECOMP))
    yield compared(
        "ideal fraction of 1F1B and Chronos-Pipe by the paper's formula, T_c = 0.104 T_unit",
        paper=[f"{plain[0]:.4f}", f"{chronos[0]:.4f}"],
        ours=[plain[1], chronos[1]],
    )
    yield compared(
        "points that Chronos-Pipe is below 1F1B, as derived", paper=("5",), ours=[100 * (plain[1] - chronos[1])]
    )
    yield compared(
        "points that Chronos-Pipe is below 1F1B, as measured",
        paper=("6",),
        ours=[100 * (plain[1] - chronos[1])],
        because="the paper lays 5 of them on messages too, and does not say what the sixth is",
    )
    yield compared(
        "points that Chronos-Recomp is below 1F1B + R = 50%, where the receiver waits",
        paper=("at most 3",),
        ours=[100 * (half[2] - recomp[2])],
    )
    yield compared(
        "the same with blocking messages",
        paper=("at most 3",),
        ours=[100 * (half[1] - recomp[1])],
        because="messages that block both ends never overlap recomputation, which section 4.2 says they do",
    )
    yield table
    yield Bars(
        title=table.title,
        groups=list(rows),
        series={name: [row[1 + at] for row in rows.values()] for at, name in enumerate(table.columns[2:])},
        unit="ideal computation fraction",
    )


def figure_14() -> Iterator[Exhibit]:
    """Scaling of Chronos-Offload."""
    table = schedules.figure_14()
    ours = [number(row[2]) for row in table.cells]
    yield compared(
        "host step hidden at PP4 (fitted), with twice the stages, with twice the length",
        paper=("45.45", "94.55", "100"),
        ours=ours[:3],
        unit="%",
        because="the first is fitted and the others double; the paper's idle time and attention grow by more",
    )
    yield table
    yield Bars(
        title=table.title,
        groups=[str(row[0]) for row in table.rows],
        series={"ours": ours},
        paper={"ours": [None if row[1] is None else number(row[1]) for row in table.rows]},
        unit="percent",
    )


def figure_15() -> Iterator[Exhibit]:
    """Recomputation of more chunks."""
    table = schedules.figure_15()
    kept = {(row[0], number(row[1])): number(row[2]) for row in table.cells}
    shares = sorted({share for _, share in kept})
    never = all(number(row[2]) <= number(row[3]) for row in table.cells)
    yield compared(
        "4 chunks, 25% recomputed: activations in percent of m_a (printed as `reduced by up to`)",
        paper=("43.75",),
        ours=[kept[4, 25]],
        unit="%",
    )
    yield holds("Chronos-Recomp never keeps more than 1F1B with the same recomputation", never)
    yield table
    yield Lines(
        title=table.title,
        across="layers that recompute, percent",
        x=shares,
        series={
            **{f"{v} chunks": [kept.get((v, share)) for share in shares] for v in (2, 3, 4)},
            "1F1B": [100 - share for share in shares],
        },
        unit="percent of m_a",
    )


def figure_16() -> Iterator[Exhibit]:
    """Offload with more chunks."""
    table = schedules.figure_16()
    kept = {f"{row[0]} chunks": [number(cell) for cell in row[4:]] for row in table.cells}
    yield compared(
        "idle backwards in the cool-down with 3 and 4 chunks, of those with 2",
        paper=("1.5", "1.5"),
        ours=[row[2] for row in table.cells[1:]],
        because="ours with 4 chunks is the order that holds least activations; orders that hold more have 1.5",
    )
    yield stated(
        "more chunks let more states go where the host is fast, and fewer where it is slow",
        paper="diminishing returns",
        ours="diminishing returns"
        if kept["4 chunks"][0] < kept["2 chunks"][0]
        and kept["4 chunks"][0] - kept["3 chunks"][0] > kept["3 chunks"][0] - kept["2 chunks"][0]
        else "returns that do not diminish",
    )
    yield table
    yield Lines(
        title="Figure 16: model states kept at PP4, as many deep chunks on the host as lose no time",
        across="time of the host for a device's parameters, T_unit",
        x=schedules.HOST_TIMES,
        series=kept,
        unit="percent",
    )
