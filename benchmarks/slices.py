"""Sliced sequences: the best plan with and without slices, for long contexts on few devices.

    python benchmarks/slices.py [CASE ...]
    python benchmarks/slices.py --docs         # docs/notes/slices.md

Each case is the search of degrees of `debubble plan --global-batch`, with `--slices 1` and with slices free; steps are
simulated.  `context` is the best of the searched choices with context-parallel ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmark import Benchmark, Row, table

import debubble as db
from debubble.ir import DebubbleError, RunOptions
from debubble.planners.degrees.search import search_degrees
from debubble.planners.degrees.space import Job

EFFORT = 1.0
INTRODUCTION = """# Long contexts in slices

2026-11-27.  Simulated steps of Llama-3 8B in bf16 with AdamW, of the best plan that `debubble plan llama3-8b
--cluster CLUSTER --sequence-length TOKENS --global-batch BATCH --effort 1` finds, with whole sequences (`--slices 1`),
with slices and no context-parallel ranks (`--context 1`), and with both free.  None has run on these devices;
attention to other ranks' keys goes around a ring next to computing, which is predicted to hide its messages also where
devices have PCIe alone.  `debubble plan` says of a given pipeline how much slices bring.  Written by
`python benchmarks/slices.py --docs`.

"""


class Case(NamedTuple):
    """A job."""

    cluster: str
    tokens: int
    batch: int


CASES = {
    f"{cluster.partition('x')[2].partition('-')[0]}-{tokens // 1024}k-{batch}": Case(cluster, tokens, batch)
    for cluster in ("8xL40S-48GB", "8xRTX4090-24GB", "8xH100-80GB")
    for tokens in (2**15, 2**17, 2**19)
    for batch in (1, 4, 16)
}


def step(case: Case, **fixed: int) -> dict[str, object]:
    """Step and degrees of the best plan, or the reason why there is none."""
    options = RunOptions(sequence_length=case.tokens)
    cluster = db.Cluster.parse(case.cluster)
    job = Job(
        model=db.models["llama3-8b"], cluster=cluster, global_batch=case.batch, options=options, fixed=fixed,
        effort=EFFORT,
    )  # fmt: skip
    try:
        best = search_degrees(job, planner="auto")
    except DebubbleError as error:
        return {"seconds": None, "why": str(error)}
    return {"seconds": float(best.result.time), "degrees": str(best.degrees), "gap": best.result.gap}


def measure(case: Case) -> Row:
    """Run the three searches of a job."""
    return {"whole": step(case, slices=1), "sliced": step(case, context=1), "free": step(case)}


def page(rows: list[Row]) -> str:
    """The note: one row per job."""

    def cell(answer: dict[str, object]) -> str:
        seconds = answer["seconds"]
        return "does not fit" if seconds is None else f"{seconds:.3g} s: {answer['degrees']}"

    def gain(row: Row) -> str:
        unsliced, free = row["whole"]["seconds"], row["free"]["seconds"]
        return "" if unsliced is None or free is None else f"{unsliced / free:.2f}"

    lines = [(row["case"], cell(row["whole"]), cell(row["sliced"]), cell(row["free"]), gain(row)) for row in rows]
    return INTRODUCTION + table(
        ("job", "whole sequences", "slices, no context ranks", "both free", "times as fast as whole"), lines
    )


if __name__ == "__main__":
    Benchmark(name="slices", about=__doc__, cases=CASES, measure=measure, pages={"notes/slices.md": page}).main()
