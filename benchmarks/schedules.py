"""Our schedules beside the figures of the zero-bubble authors' own schedulers, and how long generating them takes.

    python benchmarks/schedules.py table [--devices 4 8 16]   # bubble and peak, into benchmarks/results/schedules.json
    python benchmarks/schedules.py speed                      # seconds per schedule, printed
    python benchmarks/schedules.py docs                       # tables and pictures of docs/schedules.md

Setting: m = 4 p; uniform costs F = I = W = 1, or F, I, W, C = 10, 11, 9, 1 (a), or 18478, 18098, 9337, 1000 (b); a
stage of v chunks per device takes 1 / v of that.  One activation is allocated by F and freed by W.  Bubble:
1 - m (F + I + W) / (largest span of a device); in brackets the same with the makespan.  Where the default answer is
worse than the original's, more candidates are tried, and then local search goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from fractions import Fraction
from pathlib import Path

import debubble as db

RESULTS = Path(__file__).parent / "results" / "schedules.json"
TIMES = {"uniform": (1, 1, 1, 0), "a": (10, 11, 9, 1), "b": (18478, 18098, 9337, 1000)}
DEVICES = (4, 8, 16)

# Row: schedule, chunks, activations that the original holds per p, options, and whether it is searched for.
ROWS = {
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


def costs_of(p: int, v: int, times: str, *, transfer: Fraction | int | None = None, limit: float | None = None):
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


def measure(row: str, p: int, times: str, objective: str, original: float, effort: int) -> dict[str, object]:
    """Bubble in percent and peak of one cell."""
    name, v, peaks, setting = ROWS[row]
    m = 4 * p
    limit = peaks[DEVICES.index(p)] if "limit" in setting else None
    costs = costs_of(p, v, times, transfer=setting.get("transfer"), limit=limit)
    options = {k: x for k, x in setting.items() if k == "offload"}
    efforts: list[dict[str, object]] = [options]
    if "objective" in db.schedules[name].options:
        operations = 3 * p * v * m
        options["objective"] = objective
        efforts.append({**options, "tries": 400})
        efforts.append({**options, "tries": 400, "steps": 150_000_000 // operations})
    work = m * sum(TIMES[times][:3])
    begin = time.perf_counter()
    for tried in efforts[:effort]:
        schedule = db.schedules[name](devices=p, micro_batches=m, chunks=v, costs=costs, **tried)
        timeline = db.simulate(schedule, costs)
        if round(100 * (1 - work / float(getattr(timeline, objective))), 1) <= original:
            break
    return {
        "row": row,
        "devices": p,
        "times": times,
        "objective": objective,
        "span_bubble": round(100 * (1 - work / float(timeline.span)), 4),
        "makespan_bubble": round(100 * (1 - work / float(timeline.makespan)), 4),
        "peak": float(max(timeline.peak_memory)),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def table(devices: list[int], effort: int) -> None:
    """Measure every cell that is not yet in the results, and keep each as soon as it is there."""
    RESULTS.parent.mkdir(exist_ok=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(c["row"], c["devices"], c["times"], c["objective"]) for c in kept}
    for p in devices:
        for row, (name, *_rest) in ROWS.items():
            for times in TIMES:
                objectives = ["span", "makespan"] if "objective" in db.schedules[name].options else ["span"]
                for objective in objectives:
                    originals = ORIGINAL[row].get("makespan" if objective == "makespan" else times)
                    if originals is None or (objective == "makespan" and times != "uniform"):
                        continue
                    if (row, p, times, objective) in done:
                        continue
                    original = originals[DEVICES.index(p)]
                    cell = measure(row, p, times, objective, original, effort) | {"original": original}
                    print(cell, flush=True)
                    kept.append(cell)
                    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def speed() -> None:
    """Seconds to generate each schedule at two sizes, with default options."""
    for name, entry in db.schedules.items():
        v = entry.default_chunks
        for p, m in ((16, 64), (64, 512)):
            begin = time.perf_counter()
            try:
                entry(devices=p, micro_batches=m, chunks=v)
            except db.DebubbleError as error:
                print(f"{name:20} p={p:3} m={m:4} {error}")
                continue
            print(f"{name:20} p={p:3} m={m:4} {time.perf_counter() - begin:7.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["table", "speed", "docs"])
    parser.add_argument("--devices", type=int, nargs="*", default=list(DEVICES))
    parser.add_argument(
        "--effort", type=int, default=3, help="1: the defaults; 2: more candidates; 3: and local search"
    )
    chosen = parser.parse_args()
    if chosen.what == "table":
        table(chosen.devices, chosen.effort)
    elif chosen.what == "speed":
        speed()
    else:
        from schedules_docs import write

        write()


if __name__ == "__main__":
    main()
