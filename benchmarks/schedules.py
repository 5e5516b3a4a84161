"""Our schedules compared with the zero-bubble authors' schedulers.

    python benchmarks/schedules.py [ROW ...]   # bubble and peak; about a minute
    python benchmarks/schedules.py --docs      # docs/notes/schedules.md

Setting: m = 4 p; uniform costs F = I = W = 1, or F, I, W, C = 10, 11, 9, 1 (a), or 18478, 18098, 9337, 1000 (b); a
stage of v chunks per device takes 1 / v of that.  One activation is allocated by F and freed by W.  Bubble:
1 - m (F + I + W) / (largest span of a device), or the same with the makespan.  Ours are the answers to default options.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmark import Benchmark, Row, table

import debubble as db

CASES = Path(__file__).parent / "cases"
TIMES = {"uniform": (1, 1, 1, 0), "a": (10, 11, 9, 1), "b": (18478, 18098, 9337, 1000)}
DEVICES = (4, 8, 16)

ROWS: dict[str, dict[str, Any]] = json.loads((CASES / "schedules.json").read_text())
"""A schedule; activations that the original holds, at p = 4, 8, 16, and whether that is the limit; a copy's time over a
forward's; and the original's percent: of the span by costs, and of the makespan with uniform ones.  Originals are of
the authors' schedulers (public repository of 2025-05), evaluated by an independent longest-path evaluator."""

Cell = tuple[str, int, str, str]
"""Row, devices, times and objective."""


def cells() -> Iterator[Cell]:
    """Every cell with an original figure."""
    for row, entry in ROWS.items():
        for p in DEVICES:
            yield from ((row, p, times, "span") for times in TIMES if times in entry["original"])
            if "objective" in db.schedules[entry["schedule"]].options and "makespan" in entry["original"]:
                yield row, p, "uniform", "makespan"


def costs_of(entry: dict[str, Any], p: int, times: str) -> db.StageCosts:
    """Costs of the stages of p devices, as integers where possible, else as floats."""
    v = entry["chunks"]
    f, i, w, c = (
        x.numerator if x.denominator == 1 else float(x)
        for x in (Fraction(cost, divisor) for cost, divisor in zip(TIMES[times], (v, v, v, 1), strict=True))
    )
    return db.StageCosts.of(
        stages=p * v, forward=f, backward_input=i, backward_weight=w, communication=c,
        activation=Fraction(1, v), activation_after_input=Fraction(1, v),
        offload=Fraction(entry["transfer"]) * Fraction(TIMES[times][0], v) if "transfer" in entry else None,
        memory_limit=entry["peaks"][DEVICES.index(p)] if entry["limited"] else None,
    )  # fmt: skip


def measure(cell: Cell) -> Row:
    """Bubble in percent and peak of one cell."""
    row, p, times, objective = cell
    entry = ROWS[row]
    name, costs = entry["schedule"], costs_of(entry, p, times)
    options = {"offload": entry["offload"]} if "offload" in entry else {}
    if "objective" in db.schedules[name].options:
        options["objective"] = objective
    begin = time.process_time()
    schedule = db.schedules[name](devices=p, micro_batches=4 * p, chunks=entry["chunks"], costs=costs, **options)
    seconds = time.process_time() - begin
    timeline = db.simulate(schedule, costs)
    work = 4 * p * sum(TIMES[times][:3])
    return {
        "row": row, "devices": p, "times": times, "objective": objective,
        "span_bubble": round(100 * (1 - work / float(timeline.span)), 4),
        "makespan_bubble": round(100 * (1 - work / float(timeline.makespan)), 4),
        "peak": float(max(timeline.peak_memory)), "seconds": round(seconds, 2),
        "original": entry["original"]["makespan" if objective == "makespan" else times][DEVICES.index(p)],
    }  # fmt: skip


def comparison(rows: list[Row]) -> str:
    """The note: our figure and the original's for every cell."""
    row_of = {(r["row"], r["devices"], r["times"], r["objective"]): r for r in rows}
    lines = []
    for row in ROWS:
        for p in DEVICES:
            spans = [_cell(row_of.get((row, p, times, "span")), "span") for times in TIMES]
            makespan = _cell(row_of.get((row, p, "uniform", "makespan")), "makespan")
            peak = max(r["peak"] for r in rows if r["row"] == row and r["devices"] == p)
            lines.append([row, str(p), f"{peak:g}", spans[0], makespan, *spans[1:]])
    head = ("schedule", "p", "peak", "uniform", "its makespan", "a", "b")
    return f"{(CASES / 'schedules_originals.md').read_text()}\n{table(head, lines)}\n"


def _cell(row: Row | None, objective: str) -> str:
    if row is None:
        return ""
    ours = row[f"{objective}_bubble"]
    worse = round(ours, 1) > row["original"]
    return f"{ours:.1f} / {row['original']:.1f}{' (worse)' if worse else ''}"


BENCHMARK = Benchmark(
    name="schedules", about=__doc__, measure=measure, pages={"notes/schedules.md": comparison},
    cases={", ".join((row, f"p = {p}", *objective)): (row, p, *objective) for row, p, *objective in cells()},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
