"""OptPipe's figures, tables and sections in the paper's order, with their claims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from debubble.papers.claims import Claim
from debubble.papers.drawings import Bars, Lines, Timelines
from debubble.papers.optpipe.figures import program, tables
from debubble.papers.optpipe.figures.runs import BASELINES, LAYERS, METHODS, PRINTED_LAYERS, shape
from debubble.papers.optpipe.figures.tables import PRINTED, Row
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Entry, Exhibit, Paper, papers

PAPER = PrintedPaper.load("optpipe")


@cache
def rows() -> tuple[Row, ...]:
    """The rows of Table 1."""
    return tables.rows_of(PRINTED)


@cache
def scaling_rows() -> tuple[Row, ...]:
    """The rows of Figure 6."""
    return tables.rows_of(tables.FIGURE_6)


@cache
def toys() -> dict[int, Any]:
    """Number of micro-batches -> Figure 4's methods."""
    return {m: tables.toy(m) for m in (4, 6, 8)}


def figure_3() -> Iterator[Exhibit]:
    """Undetermined ordering variables, and the effect of the reductions."""
    drawing, table = program.figure_3(), program.reductions()
    decided = sum(row.count("decided by the solver") for row in drawing.cells)
    size = {row[0]: row[1:] for row in table.rows}
    every = size["all reductions"]
    fewer = ("both directions", "without transitivity", "micro-batches in any order")
    grow = all(size[name][0] > every[0] for name in fewer)
    yield PAPER.claim("figure-3.pairs", [decided])
    yield PAPER.claim("figure-3.reductions", grow)
    yield PAPER.claim("figure-3.triangles", size["triangles as rows"][3] < every[3])
    yield PAPER.claim("figure-3.initial-solution", size[program.WARM_START][4] < every[4])
    yield table
    yield drawing


def equations() -> Iterator[Exhibit]:
    """The MILP of appendix C."""
    table = program.optima()
    proven = [row[-1] for row in table.rows]
    yield PAPER.claim(
        "equations.optimum", table.column("the program, by SCIP"), printed=[f"{value:.1f}" for value in proven]
    )
    yield PAPER.claim("equations.mended", "mended")
    yield table


def algorithm_1() -> Iterator[Exhibit]:
    """AdaOffload."""
    pipe, ada = map(tables.forwards_first, tables.printed_rules(8).values())
    yield PAPER.claim(
        "algorithm-1.forwards",
        all(a >= b for a, b in zip(ada, pipe, strict=True)) and ada != pipe,
        ada=", ".join(map(str, ada)),
        pipe=", ".join(map(str, pipe)),
    )


def figure_4() -> Iterator[Exhibit]:
    """The toy example."""
    table = tables.toy_table(toys())
    idle = {row[:2]: row[3] for row in table.rows}
    saved = max(1 - idle[m, "OptPipe, optimal"] / idle[m, "AdaOffload as printed"] for m in toys())
    ahead = all(idle[m, "AdaOffload as printed"] <= idle[m, "PipeOffload as printed"] for m in toys())
    yield PAPER.claim("figure-4.as-printed", [100 * saved])
    yield PAPER.claim(
        "figure-4.library", [100 * max(1 - idle[m, "OptPipe, optimal"] / idle[m, "AdaOffload"] for m in toys())]
    )
    yield PAPER.claim("figure-4.order", ahead)
    yield PAPER.claim("figure-4.optimum", all("OptPipe, optimal" in toy for toy in toys().values()))
    yield table
    yield Timelines.from_timelines({f"{name}: {timeline.makespan}": timeline for name, timeline in toys()[6].items()})


def table_1() -> Iterator[Exhibit]:
    """Iteration times and the out-of-memory pattern."""
    pattern, advantage = tables.memory_pattern(rows()), tables.advantage(rows())
    cells = len(rows()) * len(METHODS)
    slower = [name for row in rows() if (name := row.fastest_baseline) is not None and tables.is_beaten(row, name)]
    yield PAPER.claim("table-1.cells", [cells - len(pattern.rows)], printed=(str(cells),))
    yield PAPER.claim("table-1.slower", [len(slower)])
    rich = [row for row in rows() if any(row.ours[method] is not None for method in BASELINES)]
    yield PAPER.claim(
        "table-1.comparable",
        all(_percent_of(row, BASELINES) <= COMPARABLE_PERCENT for row in rich),
        baselines=", ".join(BASELINES),
        similar=COMPARABLE_PERCENT - 100,
        rich=len(rich),
    )
    yield from _savings_claims()
    yield from _printed_table_claims()
    yield PAPER.claim("table-1.pipeoffload", [_over_1f1b(row) for row in rows() if _is_seven(row)])
    yield PAPER.claim("table-1.solver")
    yield PAPER.claim("table-1.times")
    yield tables.times(rows())
    yield pattern
    yield advantage
    yield Bars(
        title="Table 1: percent of the fastest baseline's time, ours",
        groups=[f"{r.setting.model} {r.setting.micro_batches}x{r.setting.size}" for r in rows()],
        series={name: [_percent_of_fastest(r, name) for r in rows()] for name in tables.LIMITED_AND_OPTPIPE},
        unit="percent",
        limit=100,
    )


COMPARABLE_PERCENT = 102
"""OptPipe's time counts as comparable up to this percentage of a baseline's time."""


def _percent_of(row: Row, methods: Iterable[str]) -> float:
    """OptPipe's time in percent of the fastest of these methods."""
    optpipe = row.ours["OptPipe"]
    return math.inf if optpipe is None else 100 * optpipe / min(t for m in methods if (t := row.ours[m]) is not None)


def _percent_of_fastest(row: Row, method: str) -> float | None:
    fastest, time = row.fastest_baseline, row.ours[method]
    best = None if fastest is None else row.ours[fastest]
    return None if best is None or time is None else 100 * time / best


def _savings_claims() -> Iterator[Claim]:
    groups = (("memory-rich: another baseline fits", "more than 30"), ("memory-limited", "more than 20"))
    for (name, paper), group in zip(groups, tables.rich_and_limited(rows()), strict=True):
        printed, tuned = (tables.savings(group, method) for method in (tables.PIPEOFFLOAD, tables.TUNED_PIPEOFFLOAD))
        yield PAPER.claim("table-1.saved", [min(printed)], printed=(paper,), name=name)
        yield PAPER.claim("table-1.saved-tuned", [min(tuned)], printed=(paper,), name=name, most=max(tuned))


def _printed_table_claims() -> Iterator[Claim]:
    """Claims of the paper's text on Table 1, checked against the printed table."""
    rich, limited = tables.rich_and_limited(rows())
    min_savings = [
        min(
            100 * (1 - (row.printed["OptPipe"] or math.inf) / (row.printed["PipeOffload"] or math.inf)) for row in group
        )
        for group in (rich, limited)
    ]
    slower, everywhere = tables.printed_losses(rich), tables.printed_losses(rows())
    yield PAPER.claim(
        "table-1.own-comparable",
        [len([loss for loss in slower if loss > COMPARABLE_PERCENT - 100])],
        rich=len(rich),
        similar=COMPARABLE_PERCENT - 100,
        all=len(everywhere),
        rows=len(rows()),
        most=max(everywhere),
    )
    yield PAPER.claim("table-1.own-savings", min_savings)


def _is_seven(row: Row) -> bool:
    return (row.setting.model, row.setting.micro_batches) == ("7.1B", 16) and row.printed["1F1B"] is not None


def _over_1f1b(row: Row) -> float | None:
    pipe, plain = row.ours[tables.PIPEOFFLOAD], row.ours["1F1B"]
    return None if pipe is None or plain is None else pipe / plain


def table_2() -> Iterator[Exhibit]:
    """The models' shapes."""
    sizes = {name: shape(layers, 128 if name in ("7.1B", "14.2B") else 2048) for name, layers in PRINTED_LAYERS.items()}
    printed = [sizes[name].parameters / 1e9 for name in LAYERS]
    repaired = [shape(layers).parameters / 1e9 for layers in LAYERS.values()]
    yield PAPER.claim("table-2.printed", printed)
    yield PAPER.claim("table-2.repaired", repaired, names=", ".join(f"{layers}" for layers in LAYERS.values()))


def figure_5() -> Iterator[Exhibit]:
    """Memory usage."""
    shown = tables.settings_of_figure_5(rows())
    pairs = [[tables.peaks(row, method) for method in (tables.PIPEOFFLOAD, "OptPipe")] for row in shown]
    more = [sum(optpipe[column] >= pipe[column] for pipe, optpipe in pairs) for column in (1, 2)]
    yield PAPER.claim("figure-5.memory", more, printed=(str(len(pairs)), str(len(pairs))), pairs=len(pairs))
    yield tables.memory_use(shown)
    yield Bars(
        title="Figure 5: average peak memory over the devices",
        groups=[f"{row.setting.model} {row.setting.micro_batches}x{row.setting.size}" for row in shown],
        series={
            method: [tables.peaks(row, method)[1] if method in row.timelines else None for row in shown]
            for method in tables.LIMITED_AND_OPTPIPE
        },
        unit="GiB",
    )


def figure_6() -> Iterator[Exhibit]:
    """Varying micro-batch numbers."""
    table = tables.micro_batch_scaling(scaling_rows())
    gains = tables.savings(scaling_rows(), tables.PIPEOFFLOAD)
    tuned = tables.format_range(tables.savings(scaling_rows(), tables.TUNED_PIPEOFFLOAD))
    yield PAPER.claim("figure-6.saved", [gains[-1]], gains=tables.format_range(gains), tuned=tuned)
    yield PAPER.claim("figure-6.grows", gains == sorted(gains), gain=", ".join(f"{gain:.1f}" for gain in gains))
    yield table
    yield Lines(
        title=table.title,
        across="micro-batches",
        x=[row.setting.micro_batches for row in scaling_rows()],
        series={name: [_seconds(row.ours[name]) for row in scaling_rows()] for name in tables.LIMITED_AND_OPTPIPE},
        unit="seconds",
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


papers.add(
    "optpipe",
    Paper(
        name="optpipe",
        title="OptPipe: Memory- and Scheduling-Optimized Pipeline Parallelism (under review)",
        entries=(
            Entry.diagram(
                "Figure 1",
                "the framework",
                "initialize, profile, schedule and train",
                "docs/training.md says what --online does",
            ),
            Entry.diagram(
                "Figure 2",
                "the computation graph of a stage",
                "forward, and the two halves of the backward",
                "docs/architecture.md has F, I and W",
            ),
            Entry("Figure 3", "determined and undetermined variables, section 4.1", figure_3, slow=True),
            Entry("Equations (2) to (19)", "the program, appendix C", equations, slow=True),
            Entry("Algorithm 1", "AdaOffload, appendix D", algorithm_1),
            Entry("Figure 4", "the toy example, and the abstract's 50%", figure_4, slow=True),
            Entry("Table 1", "iteration times", table_1, slow=True),
            Entry("Table 2", "the models' shapes", table_2),
            Entry("Figure 5", "memory of PipeOffload and OptPipe", figure_5, slow=True),
            Entry("Figure 6", "many micro-batches", figure_6, slow=True),
        ),
    ),
)
