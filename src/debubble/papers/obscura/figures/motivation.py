"""Obscura, sections 1 to 4: the cost of recomputation, memory under 1F1B, and bubbles that hide recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from debubble.ir import Number, StageCosts
from debubble.papers.drawings import Bars
from debubble.papers.obscura.figures.fit import DEVICES, LLAMA, problem
from debubble.papers.obscura.figures.runs import on_demand, planned, timeline_of
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Exhibit, Table
from debubble.simulator import Timeline, simulate

PAPER = PrintedPaper.load("obscura")


def section_1() -> Iterator[Exhibit]:
    """The memory that training Llama-2 13B takes."""
    run = timeline_of(planned("dapple")(problem("Llama-2", "13B", 16)))
    memory = sum(map(float, run.peak_memory))
    yield PAPER.claim("section-1.memory", [memory])
    yield PAPER.claim("section-1.devices", [math.ceil(memory / (0.9 * 80))])


def figure_3() -> Iterator[Exhibit]:
    """Memory under 1F1B."""
    rows = []
    for size in ("13B", "18B"):
        run = timeline_of(planned("dapple")(problem("Llama-2", size, 16)))
        rows.append((size, *(round(float(peak), 1) for peak in run.peak_memory)))
    table = PAPER.table("figure-3", rows)
    peaks = table.by_key
    gap = peaks["13B"][0] - peaks["13B"][-1]
    yield PAPER.claim("figure-3.difference", [gap])
    yield PAPER.claim("figure-3.stage-0", peaks["18B"][0] > 80)
    yield table
    yield Bars(
        title="Figure 3: memory of each stage under 1F1B",
        groups=[f"stage {s}" for s in range(DEVICES)],
        series={f"Llama-2 {size}": values for size, values in peaks.items()},
        unit="GB",
        limit=80,
    )


FIGURE_5 = {
    "Recomp-Non": ("1f1b", 0),
    "Recomp-0": ("1f1b", 1),
    "Recomp-1": ("1f1b", 2),
    "Recomp-All": ("1f1b", 4),
    "Strawman-0": ("strawman", 1),
    "Strawman-1": ("strawman", 2),
}
PAPER_5: Mapping[str, int] = PAPER.printed["figure-5"]
"""Increase of the step time over no recomputation, in percent."""


def figure_5() -> Iterator[Exhibit]:
    """Computation, bubbles and recomputation of four stages."""
    fastest = four_stages("Recomp-Non", messages=True)
    table = PAPER.table(
        "figure-5",
        tuple(
            (name, paper, round(100 * float(four_stages(name, messages=True).makespan / fastest.makespan - 1), 1))
            for name, paper in PAPER_5.items()
        ),
    )
    slower = dict(zip(PAPER_5, table.column("ours"), strict=True))
    parts = {
        "a": breakdown(("Recomp-Non", "Recomp-0", "Recomp-1", "Recomp-All"), panel="a"),
        "b": breakdown(("Strawman-0", "Strawman-1"), panel="b"),
        "c": breakdown(("Strawman-0", "Strawman-1"), panel="c", recompute=LLAMA.mlp_time),
    }
    plain, strawman, mlp = parts["a"].by_key, parts["b"].by_key, parts["c"].by_key
    bubbles = float(fastest.forward_bubbles[0]), float(fastest.backward_bubbles[0])
    yield PAPER.claim("figure-5.recomputation", [slower[name] for name in ("Recomp-0", "Recomp-1", "Recomp-All")])
    yield PAPER.claim("figure-5.strawman", [slower["Strawman-0"], slower["Strawman-1"]])
    yield PAPER.claim("figure-5.bubble-ratio", [bubbles[0] / bubbles[1]])
    yield PAPER.claim("figure-5.backward-bubbles-left", [plain["Recomp-0", 0][2]])
    yield PAPER.claim("figure-5.backward-bubbles-unaffected", [plain["Recomp-Non", 0][2], plain["Recomp-All", 0][2]])
    ahead = [plain[name, 0][1] for name in ("Recomp-Non", "Recomp-0", "Recomp-1", "Recomp-All")]
    yield PAPER.claim("figure-5.forward-bubbles-longer", ahead[0] == ahead[1] < min(ahead[2:]))
    yield PAPER.claim("figure-5.strawman-forward-bubbles", [strawman["Strawman-0", 0][1]])
    yield PAPER.claim("figure-5.mlp", mlp["Strawman-0", 0][2] > strawman["Strawman-0", 0][2])
    yield PAPER.claim(
        "figure-5.imbalance",
        all(
            bubbles[name, stage][2] > plain["Recomp-Non", stage][2]
            for bubbles in (strawman, mlp)
            for name, first in (("Strawman-0", 1), ("Strawman-1", 2))
            for stage in range(first, 4)
        ),
    )
    yield table
    yield from parts.values()
    yield from (table.bars("forwards", table.columns[2:], names="{} {}", stacked=True) for table in parts.values())


def breakdown(names: Sequence[str], *, panel: str, recompute: Number = 1) -> Table:
    """Computation, bubbles and recomputation per stage of the named pipelines of Figure 5."""
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        run = four_stages(name, recompute)
        for stage in range(4):
            parts = (
                run.busy[stage] - run.recompute[stage], run.forward_bubbles[stage], run.backward_bubbles[stage],
                run.recompute[stage],
            )  # fmt: skip
            rows.append((name, stage, *(round(float(time), 2) for time in parts)))
    return PAPER.table("breakdown", rows, part=panel)


MESSAGE, BACKWARD = 0.068, 1.92
"""Fitted times of Figure 5's P2P messages (the receiver waits) and backwards, in forwards."""


def four_stages(name: str, recompute: Number = 1, *, messages: bool = False) -> Timeline:
    """Simulate a pipeline of Figure 5; `recompute` in forwards, `messages` uses the fitted MESSAGE and BACKWARD."""
    built, stages = FIGURE_5[name]
    schedule = on_demand(built, devices=4, micro_batches=13, stages=stages)
    costs = StageCosts.of(stages=4, recompute=recompute)
    if messages:
        half = [BACKWARD / 2] * 4
        costs = costs.replace(backward_input=half, backward_weight=half, communication=MESSAGE)
        costs = costs.replace(communication_model="receiver")
    return simulate(schedule, costs)


def table_1() -> Iterator[Exhibit]:
    """Memory with MLP recomputation."""
    costs = StageCosts.of(
        stages=4, activation=5.5344, activation_recomputed=2.0314, recompute_workspace=0, static=25.8229
    )
    rows: list[tuple[Cell, ...]] = []
    for name, paper in PAPER.printed["table-1"].items():
        kind, _, last = name.partition("-")
        adjusted = 0 if last == "Non" else int(last) + 1
        built = "strawman" if kind == "Strawman" else "1f1b"
        schedule = on_demand(built, devices=4, micro_batches=16, stages=adjusted)
        ours = [round(float(peak), 2) for peak in simulate(schedule, costs).peak_memory]
        rows.append((name, *(cell for pair in zip(paper, ours, strict=True) for cell in pair)))
    table = PAPER.table("table-1", rows)
    cells = [(paper, ours) for row in table.rows for paper, ours in zip(row[1::2], row[2::2], strict=True)]
    off = max(abs(ours / paper - 1) for paper, ours in cells)
    yield PAPER.claim(
        "table-1.memory",
        [
            *table.by_key["Recomp-Non"][1::2],
            *(value for name in ("Recomp-1", "Strawman-1") for value in table.by_key[name][1:4:2]),
        ],
        off=100 * off,
    )
    yield table
    yield Bars(
        title="Table 1: memory of each stage, MLP recomputation",
        groups=[row[0] for row in table.rows],
        series={f"stage {s}": [row[2 + 2 * s] for row in table.rows] for s in range(4)},
        paper={f"stage {s}": [row[1 + 2 * s] for row in table.rows] for s in range(4)},
        unit="GB",
    )
