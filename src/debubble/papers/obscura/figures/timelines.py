"""Simulated timelines of Obscura's Figures 1, 2, 4, 6 and 8 to 11.

The text gives p = 2, m = 6 and p = 3, m = 8, k = 1; f = 1, b = 2.  A stage that recomputes stores 4 of 10.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from debubble.ir import Number, StageCosts
from debubble.papers.drawings import Timelines
from debubble.papers.obscura.figures.runs import on_demand
from debubble.papers.obscura.schedule import obscura
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Exhibit, Table
from debubble.schedules import schedules
from debubble.simulator import Timeline, simulate

PAPER = PrintedPaper.load("obscura")

HALF = Fraction(1, 2)
"""r = f / 2."""

Line = tuple[str, str, int]
"""Title, schedule name, number of stages that recompute or are adjusted."""

FIGURE_1: tuple[Line, ...] = (
    ("all stages recompute", "1f1b", 2),
    ("recomputation on demand", "1f1b", 1),
    ("strawman", "strawman", 1),
    ("Obscura", "obscura", 1),
)
FIGURE_6: tuple[Line, ...] = (("1F1B with recomputation on stages 0 and 1", "1f1b", 2), ("strawman", "strawman", 2))
FIGURE_8: tuple[Line, ...] = (("strawman", "strawman", 1), ("dependency relaxation", "dependency-relaxed", 1))
FIGURE_9: tuple[Line, ...] = (
    ("strawman", "strawman", 2),
    ("dependency relaxation", "dependency-relaxed", 2),
    ("migration refinement: Obscura", "obscura", 2),
)


def figure_1() -> Iterator[Exhibit]:
    """The transformation with r = f / 2: each pipeline is faster than the previous one."""
    runs = _runs(FIGURE_1, devices=2, micro_batches=6, recompute=HALF)
    times = [float(run.makespan) for run in runs.values()]
    falling = all(after < before for before, after in itertools.pairwise(times))
    yield PAPER.claim("figure-1.faster", falling)
    yield _table("Figure 1: p = 2, m = 6, r = f / 2", runs)
    yield Timelines.from_timelines(runs)


def figure_2() -> Iterator[Exhibit]:
    """1F1B: warm-up, steady phase and ending, and the activations of each stage."""
    costs = StageCosts.of(stages=4)
    run = simulate(schedules["1f1b"](devices=4, micro_batches=8), costs)
    idle = zip(run.forward_bubbles, run.backward_bubbles, strict=True)
    yield PAPER.claim("figure-2.activations", [float(peak) for peak in run.peak_memory])
    yield PAPER.claim("figure-2.bubbles", [float(time) for pair in idle for time in pair])
    yield Timelines.from_timelines({"1F1B, p = 4, m = 8": run})


def figure_4() -> Iterator[Exhibit]:
    """Recomputation on stages 0 and 1 of three, and the bubbles that absorb it."""
    before = simulate(on_demand("1f1b", devices=3, micro_batches=8, stages=0), _costs(3, 1))
    after = simulate(on_demand("1f1b", devices=3, micro_batches=8, stages=2), _costs(3, 1))
    yield PAPER.claim("figure-4.backward-bubble", [8 - float(after.makespan - before.makespan - 1)])
    yield PAPER.claim(
        "figure-4.forward-bubbles",
        [max(float(b - a), 0.0) for b, a in zip(before.forward_bubbles[:2], after.forward_bubbles[:2], strict=True)],
    )
    yield Timelines.from_timelines({"1F1B without recomputation": before, "Recomp-1: stages 0 and 1 recompute": after})


def figure_6() -> Iterator[Exhibit]:
    """The strawman next to 1F1B, both with full recomputation."""
    runs = _runs(FIGURE_6, devices=3, micro_batches=8, recompute=1)
    first, second = (float(run.makespan) for run in runs.values())
    bubbles = [float(run.forward_bubbles[1]) for run in runs.values()]
    yield PAPER.claim("figure-6.strawman-faster", second < first)
    yield PAPER.claim("figure-6.forward-bubble", [bubbles[1]])
    yield _table("Figure 6: p = 3, m = 8, r = f", runs)
    yield Timelines.from_timelines(runs)


def figure_8() -> Iterator[Exhibit]:
    """Two neighboring stages, of which the first is adjusted."""
    runs = _runs(FIGURE_8, devices=2, micro_batches=8, recompute=HALF)
    strawman, relaxed = (float(run.makespan) for run in runs.values())
    yield PAPER.claim("figure-8.forwards-move", relaxed < strawman)
    yield _table("Figure 8: p = 2, m = 8, k = 0, r = f / 2", runs)
    yield Timelines.from_timelines(runs)


def figure_9() -> Iterator[Exhibit]:
    """From the strawman to Obscura: less time, then less memory."""
    runs = _runs(FIGURE_9, devices=3, micro_batches=8, recompute=HALF)
    strawman, relaxed, refined = runs.values()
    saved = relaxed.peak_memory[0] > refined.peak_memory[0] and relaxed.makespan == refined.makespan
    yield PAPER.claim("figure-9.dependency-relaxation", relaxed.makespan < strawman.makespan)
    yield PAPER.claim("figure-9.migration-refinement", saved)
    yield _table("Figure 9: p = 3, m = 8, k = 1, r = f / 2", runs)
    yield Timelines.from_timelines(runs)


def figure_10() -> Iterator[Exhibit]:
    """Stage 0 of three without swapping, and with three of its seven blocks swapped."""
    runs = {}
    for blocks, limit in ((0, (28, 20, 10)), (3, (16, 20, 10))):
        costs = _costs(3, HALF).replace(offload=Fraction(5, 2), memory_limit=limit)
        schedule = obscura(devices=3, micro_batches=13, adjusted_stages=1, swapped_blocks=blocks)
        runs[f"Obscura, {blocks or 'no'} blocks swapped"] = simulate(schedule, costs)
    unswapped, swapped = runs.values()
    yield PAPER.claim("figure-10.equation-1", [float(run.peak_memory[0]) for run in runs.values()])
    yield PAPER.claim("figure-10.transfers-below", swapped.makespan == unswapped.makespan)
    yield _table("Figure 10: p = 3, m = 13, k = 0, r = f / 2, transfers of 2.5 f", runs)
    yield Timelines.from_timelines(runs)


def figure_11() -> Iterator[Exhibit]:
    """More recomputation and less swapping, and vice versa, under the same limit and a slow link."""
    runs = {}
    for title, recompute, recomputed, blocks in (
        ("(a) more recomputation, less swapping", Fraction(3, 4), 5, 2),
        ("(b) less recomputation, more swapping", Fraction(1, 4), 8, 5),
    ):
        costs = _costs(4, recompute).replace(activation_recomputed=recomputed, offload=Fraction(9, 2), memory_limit=40)
        schedule = obscura(devices=4, micro_batches=16, adjusted_stages=1, swapped_blocks=blocks)
        runs[title] = simulate(schedule, costs)
    more, less = runs.values()
    yield PAPER.claim("figure-11.transfers-longer", less.makespan > more.makespan)
    yield _table(
        "Figure 11: p = 4, m = 16, k = 0, memory for 4 activations, transfers of 4.5 f for a whole one",
        runs,
        keeps="(a) keeps 5 of an activation of 10, (b) 8",
    )
    yield Timelines.from_timelines(runs)


def _runs(lines: tuple[Line, ...], *, devices: int, micro_batches: int, recompute: Number) -> dict[str, Timeline]:
    """Simulate the schedules; title -> timeline."""
    costs = _costs(devices, recompute)
    return {
        title: simulate(on_demand(name, devices=devices, micro_batches=micro_batches, stages=stages), costs)
        for title, name, stages in lines
    }


def _table(title: str, runs: dict[str, Timeline], *, keeps: str = "a stage that recomputes keeps 4 of 10") -> Table:
    """A table of step time, bubbles and memory of stage 0 per run."""
    return Table(
        title=title,
        columns=("pipeline", "step", "forward bubble of stage 0", "backward bubble", "memory of stage 0"),
        rows=tuple(
            (
                name,
                float(run.makespan),
                float(run.forward_bubbles[0]),
                float(run.backward_bubbles[0]),
                float(run.peak_memory[0]),
            )
            for name, run in runs.items()
        ),
        basis="exact",
        note=f"Times in forwards; {keeps}.",
    )


def _costs(devices: int, recompute: Number) -> StageCosts:
    return StageCosts.of(
        stages=devices, recompute=recompute, activation=10, activation_recomputed=4, recompute_workspace=0
    )
