"""Our schedules beside the figures of the zero-bubble authors' own schedulers, and how long generating them takes.

    python benchmarks/schedules.py table   # bubble and peak, into benchmarks/results/schedules.json; about a minute
    python benchmarks/schedules.py speed   # CPU seconds per schedule, printed; about a minute
    python benchmarks/schedules.py docs    # tables and pictures of docs/schedules.md from the results; half a minute

Setting: m = 4 p; uniform costs F = I = W = 1, or F, I, W, C = 10, 11, 9, 1 (a), or 18478, 18098, 9337, 1000 (b); a
stage of v chunks per device takes 1 / v of that.  One activation is allocated by F and freed by W.  Bubble:
1 - m (F + I + W) / (largest span of a device), or the same with the makespan.  Ours are the answers to default options.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import debubble as db

RESULTS = Path(__file__).parent / "results" / "schedules.json"
TIMES = {"uniform": (1, 1, 1, 0), "a": (10, 11, 9, 1), "b": (18478, 18098, 9337, 1000)}
DEVICES = (4, 8, 16)

# Row: schedule, chunks, activations that the original holds per p, options, and whether it is searched for.
ROWS: dict[str, tuple[str, int, tuple[float, ...], dict[str, Any]]] = {
    "1F1B": ("1f1b", 1, (4, 8, 16), {}),
    "interleaved, v = 2": ("interleaved", 2, (5.5, 11.5, 23.5), {}),
    "group-interleaved, v = 4, g = p": ("group-interleaved", 4, (4, 8, 16), {}),
    "zb at 1F1B's memory": ("zb", 1, (4, 8, 16), {"limit": 1}),
    "zb at twice that": ("zb", 1, (8, 16, 32), {"limit": 1}),
    "zb-v": ("zb-v", 2, (4, 8, 16), {"limit": 1}),
    "v-half": ("v-half", 2, (3, 5, 9), {"limit": 1}),
    "v-min": ("v-min", 2, (2, 4, 6), {"limit": 1}),
    "pipeoffload, v = 2, half, r = 1": ("pipeoffload", 2, (2, 4, 8), {"transfer": 1, "offload": "half"}),
    "pipeoffload, v = 2, full, r = 1/2": ("pipeoffload", 2, (1, 1, 1), {"transfer": Fraction(1, 2), "limit": 1}),
    "pipeoffload, v = 4, full, r = 1/2": (
        "pipeoffload", 4, (0.75, 0.75, 0.75), {"transfer": Fraction(1, 2), "limit": 1},
    ),
}  # fmt: skip

ORIGINAL = json.loads((Path(__file__).parent / "zero_bubble_originals.json").read_text())["bubble"]
"""Percent at p = 4, 8, 16: of the span with each set of costs, and of the makespan with uniform ones."""


def costs_of(
    p: int, v: int, times: str, *, transfer: Fraction | int | None = None, limit: float | None = None
) -> db.StageCosts:
    forward, backward_input, backward_weight, communication = (Fraction(x) for x in TIMES[times])
    return db.StageCosts.of(
        stages=p * v,
        forward=_plain(forward / v),
        backward_input=_plain(backward_input / v),
        backward_weight=_plain(backward_weight / v),
        communication=_plain(communication),
        activation=Fraction(1, v),
        activation_after_input=Fraction(1, v),
        offload=None if transfer is None else transfer * forward / v,
        memory_limit=limit,
    )


def _plain(x: Fraction) -> Fraction | int | float:
    """The same number, of a type that is quick to add where that is exact."""
    return x.numerator if x.denominator == 1 else float(x)


def measure(row: str, p: int, times: str, objective: str) -> dict[str, Any]:
    """Bubble in percent and peak of one cell."""
    name, v, peaks, setting = ROWS[row]
    m = 4 * p
    limit = peaks[DEVICES.index(p)] if "limit" in setting else None
    costs = costs_of(p, v, times, transfer=setting.get("transfer"), limit=limit)
    options = {"offload": setting["offload"]} if "offload" in setting else {}
    if "objective" in db.schedules[name].options:
        options["objective"] = objective
    begin = time.process_time()
    schedule = db.schedules[name](devices=p, micro_batches=m, chunks=v, costs=costs, **options)
    seconds = time.process_time() - begin
    timeline = db.simulate(schedule, costs)
    work = m * sum(TIMES[times][:3])
    return {
        "row": row,
        "devices": p,
        "times": times,
        "objective": objective,
        "span_bubble": round(100 * (1 - work / float(timeline.span)), 4),
        "makespan_bubble": round(100 * (1 - work / float(timeline.makespan)), 4),
        "peak": float(max(timeline.peak_memory)),
        "seconds": round(seconds, 2),
        "original": ORIGINAL[row]["makespan" if objective == "makespan" else times][DEVICES.index(p)],
    }


def cells() -> Iterator[tuple[str, int, str, str]]:
    """Row, devices, times and objective of every cell that the originals have."""
    for row, (name, *_rest) in ROWS.items():
        for p in DEVICES:
            yield from ((row, p, times, "span") for times in TIMES if times in ORIGINAL[row])
            if "objective" in db.schedules[name].options and "makespan" in ORIGINAL[row]:
                yield row, p, "uniform", "makespan"


def table() -> None:
    """Measure every cell."""
    from provenance import measured_by

    RESULTS.parent.mkdir(exist_ok=True)
    measured = []
    for cell in cells():
        measured.append(measure(*cell))
        print(measured[-1], flush=True)
    RESULTS.write_text(json.dumps({**measured_by(), "rows": measured}, indent=1) + "\n")


def speed() -> None:
    """CPU seconds to generate each schedule at two sizes, with default options."""
    for name, entry in db.schedules.items():
        v = entry.default_chunks
        for p, m in ((16, 64), (64, 512)):
            begin = time.process_time()
            try:
                entry(devices=p, micro_batches=m, chunks=v)
            except db.DebubbleError as error:
                print(f"{name:20} p={p:3} m={m:4} {error}")
                continue
            print(f"{name:20} p={p:3} m={m:4} {time.process_time() - begin:7.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["table", "speed", "docs"])
    chosen = parser.parse_args()
    if chosen.what == "table":
        table()
    elif chosen.what == "speed":
        speed()
    else:
        from schedules_docs import write

        write()


if __name__ == "__main__":
    main()
