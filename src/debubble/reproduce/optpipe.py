"""OptPipe's Table 1 and Figures 4 to 6 beside ours.

Table 1 is a measurement and partly implausible (see its note), so ours confirms what follows from schedules alone:
which method runs out of memory where, and that the optimised schedule is never slower than any baseline that fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from debubble.ir import Number, Placement, StageCosts
from debubble.reproduce.optpipe_pictures import draw
from debubble.reproduce.optpipe_runs import (
    BASELINES,
    METHODS,
    TABLE_1,
    Setting,
    fitted_samples,
    searched,
    step,
)
from debubble.reproduce.report import Cell, Report, Table, report
from debubble.simulator import Timeline, simulate
from debubble.solver.adaoffload import ada_offload, pipe_offload
from debubble.solver.problem import OrderProblem

SECONDS = 2.0
"""Search per row of Table 1."""


@dataclass(frozen=True)
class Row:
    """One setting with what the paper printed and what we found, in ms."""

    setting: Setting
    printed: Mapping[str, float | None]
    ours: Mapping[str, float | None]
    timelines: Mapping[str, Timeline]
    """PipeOffload's and OptPipe's."""


@report("optpipe")
def optpipe(pictures: Path | None) -> Report:
    """Table 1's settings on H100 costs, the toy of Figure 4, memory (Figure 5) and many micro-batches (Figure 6)."""
    rows = _rows()
    toy = _toy()
    many = _many_micro_batches()
    tables = (_times(rows), _memory_pattern(rows), _toy_table(toy), _memory_use(rows), many)
    drawn = () if pictures is None else draw(pictures, toy=toy, memory=_memory_use(rows), many=many)
    return Report(paper="OptPipe (under review)", tables=tables, pictures=drawn)


@cache
def _rows() -> tuple[Row, ...]:
    return tuple(_computed())


def _computed() -> Iterator[Row]:
    printed = [(Setting(g, model, m, b), dict(zip(METHODS, times, strict=True))) for g, model, m, b, times in TABLE_1]
    for _, group in itertools.groupby(printed, key=lambda entry: (entry[0].devices, entry[0].model)):
        entries = list(group)
        samples = fitted_samples([*entries])
        for setting, theirs in entries:
            ours: dict[str, float | None] = {m: step(setting, m, samples) for m in (*BASELINES, "PipeOffload")}
            timelines: dict[str, Timeline] = {}
            if ours["PipeOffload"] is not None:
                costs = setting.limited(setting.costs(1), samples)
                timelines["PipeOffload"] = simulate(pipe_offload(costs, setting.micro_batches), costs)
            found = searched(setting, samples, seconds=SECONDS)
            if found is not None:
                timelines["OptPipe"] = simulate(*found)
            ours["OptPipe"] = None if found is None else 1000 * float(timelines["OptPipe"].span)
            yield Row(setting, theirs, ours, timelines)


def _named(row: Row) -> tuple[Cell, ...]:
    s = row.setting
    return s.devices, s.model, s.micro_batches, s.size


def _times(rows: tuple[Row, ...]) -> Table:
    def cell(row: Row, method: str) -> str:
        theirs, ours = row.printed[method], row.ours[method]
        return f"{'OOM' if theirs is None else round(theirs)} / {'OOM' if ours is None else round(ours)}"

    return Table(
        title="Table 1: iteration time in ms, paper / ours",
        columns=("GPUs", "model", "micro-batches", "size", *METHODS, "fastest of ours"),
        rows=tuple((*_named(r), *(cell(r, m) for m in METHODS), _fastest(r)) for r in rows),
        basis="measured",
        note="Not reproducible as it stands: doubling the micro-batches must multiply the time by 1 to 2, the paper has"
        " 0.72 to 4.04; six 3.6B cells are exactly 1.34574 x others; Table 2's shapes are repaired: hidden size 2048,"
        " as many layers as the name asks for."
        f" Ours are simulated spans on H100 costs, OptPipe's with {SECONDS:g} s of search per row.",
    )


def _fastest(row: Row) -> str:
    there = {method: time for method, time in row.ours.items() if time is not None}
    return min(there, key=lambda method: there[method])


def _memory_pattern(rows: tuple[Row, ...]) -> Table:
    cells = [(r, m) for r in rows for m in METHODS]
    different = [(r, m) for r, m in cells if (r.printed[m] is None) != (r.ours[m] is None)]
    slower = sum(map(_beaten, rows))
    listed = tuple(
        (*_named(r), m, "OOM" if r.printed[m] is None else "runs", "OOM" if r.ours[m] is None else "runs")
        for r, m in different
    )
    agree = f"{len(cells) - len(different)} of {len(cells)} cells agree"
    summary = f"{agree}; OptPipe is slower than a baseline in {slower} rows"
    return Table(
        title=f"Table 1: who runs out of memory ({summary})",
        columns=("GPUs", "model", "micro-batches", "size", "method", "paper", "ours"),
        rows=listed,
        basis="fitted",
        note="Per model one number is fitted, the room for activations. The rows listed are those that differ: in each"
        " the paper's method fits with 8 micro-batches and not with 16, although its peak is reached with fewer.",
    )


def _beaten(row: Row) -> bool:
    own = row.ours["OptPipe"]
    others = [time for method, time in row.ours.items() if method != "OptPipe" and time is not None]
    return own is None or any(time < own * (1 - 1e-9) for time in others)


def _toy_problem(micro_batches: int) -> OrderProblem:
    costs = StageCosts.of(stages=4, activation=2, activation_after_input=1, offload=1, memory_limit=6)
    return OrderProblem(placement=Placement.linear(4), micro_batches=micro_batches, costs=costs, offload=True)


def _toy() -> dict[int, dict[str, Timeline]]:
    """Figure 4's methods, for several numbers of micro-batches (the text does not give its own)."""
    from debubble.solver.optimize import optimize

    result: dict[int, dict[str, Timeline]] = {}
    for m in (4, 6, 8):
        problem = _toy_problem(m)
        *_, kept = optimize(replace(problem, offload=False), deadline=20.0, use_cache=False)
        *_, best = optimize(problem, deadline=20.0, use_cache=False)
        result[m] = {
            "no offload, optimal": simulate(kept.schedule, problem.costs),
            "PipeOffload": simulate(pipe_offload(problem.costs, m), problem.costs),
            "AdaOffload": simulate(ada_offload(problem.costs, m), problem.costs),
            "OptPipe, optimal" if best.optimal else "OptPipe": simulate(best.schedule, problem.costs),
        }
    return result


def _toy_table(toy: dict[int, dict[str, Timeline]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for m, methods in toy.items():
        for name, timeline in methods.items():
            makespan: Number = timeline.makespan
            rows.append((m, name, float(makespan), float(makespan - 3 * m)))
    return Table(
        title="Figure 4: 4 devices, all times 1, memory for 3 activations",
        columns=("micro-batches", "method", "makespan", "idle per device"),
        rows=tuple(rows),
        basis="exact",
        note="The figure is missing from the text. From PipeOffload's 18, 24, 30 to OptPipe's 15, 21, 27 the idle time"
        " halves, as the abstract says; those 18, 24, 30 are the optima of PipeOffload's rule.",
    )


def _memory_use(rows: tuple[Row, ...]) -> Table:
    """Figure 5: least, average and greatest peak over the devices, in GiB."""
    found: list[tuple[Cell, ...]] = []
    for row in rows:
        if row.setting.micro_batches not in (16, 32) or len(row.timelines) < 2:
            continue
        for method, timeline in row.timelines.items():
            peaks = [float(peak) / 2**30 for peak in timeline.peak_memory]
            average = sum(peaks) / len(peaks)
            found.append((*_named(row), method, round(min(peaks), 2), round(average, 2), round(max(peaks), 2)))
    return Table(
        title="Figure 5: peak memory per device in GiB",
        columns=("GPUs", "model", "micro-batches", "size", "method", "least", "average", "greatest"),
        rows=tuple(found),
        basis="fitted",
        note="The figure's numbers are missing from the text; it says that OptPipe uses more of the memory there is.",
    )


def _many_micro_batches() -> Table:
    """Figure 6: 7.1B on 8 GPUs, micro-batch size 8."""
    group = [(Setting(g, n, m, b), dict(zip(METHODS, t, strict=True))) for g, n, m, b, t in TABLE_1 if n == "7.1B"]
    samples = fitted_samples([*group])
    rows: list[tuple[Cell, ...]] = []
    for m in (16, 32, 64, 128, 256):
        setting = Setting(8, "7.1B", m, 8)
        theirs = step(setting, "PipeOffload", samples)
        found = searched(setting, samples, seconds=SECONDS * max(1.0, m / 32))
        ours = None if found is None else 1000 * float(simulate(*found).span)
        saved = None if ours is None or theirs is None else round(100 * (1 - ours / theirs), 1)
        rows.append((m, theirs and round(theirs, 1), ours and round(ours, 1), saved))
    return Table(
        title="Figure 6: 7.1B on 8 GPUs, size 8, by number of micro-batches",
        columns=("micro-batches", "PipeOffload ms", "OptPipe ms", "saved percent"),
        rows=tuple(rows),
        basis="measured",
        note="The paper claims about 17% at 256.",
    )
