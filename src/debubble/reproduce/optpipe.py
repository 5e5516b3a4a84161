"""OptPipe's Table 1 and Figures 4 to 6 beside ours.

Table 1 is a measurement and partly implausible (see its note), so ours confirms what follows from schedules alone:
which method runs out of memory where, and that the optimised schedule is never slower than any baseline that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    attempt,
    fitted_samples,
    searched,
)
from debubble.reproduce.report import Cell, Report, Table, report
from debubble.simulator import Timeline, simulate
from debubble.solver.adaoffload import ada_offload, pipe_offload
from debubble.solver.problem import OrderProblem

OFFLOADING = ("PipeOffload", "OptPipe")
PRINTED = {Setting(g, model, m, b): dict(zip(METHODS, times, strict=True)) for g, model, m, b, times in TABLE_1}


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
    rows = tuple(map(row, PRINTED))
    toys = {m: toy(m) for m in (4, 6, 8)}  # the text does not give Figure 4's own
    memory, many = _memory_use(rows), _many_micro_batches()
    tables = (_times(rows), _memory_pattern(rows), _toy_table(toys), memory, many)
    drawn = () if pictures is None else draw(pictures, toy=toys[6], memory=memory, many=many)
    return Report(paper="OptPipe (under review)", tables=tables, pictures=drawn)


def row(setting: Setting) -> Row:
    """One row of Table 1."""
    samples = room(setting.devices, setting.model)
    timelines = {m: t for m in (*BASELINES, "PipeOffload") if (t := attempt(setting, m, samples)) is not None}
    found = searched(setting, samples)
    if found is not None:
        timelines["OptPipe"] = found
    ours = {m: milliseconds(timelines.get(m)) for m in METHODS}
    return Row(setting, PRINTED[setting], ours, {m: timelines[m] for m in OFFLOADING if m in timelines})


@cache
def room(devices: int, model: str) -> float:
    """Samples whose activations fit a device, fitted to the paper's pattern of what runs out of memory."""
    return fitted_samples([(s, theirs) for s, theirs in PRINTED.items() if (s.devices, s.model) == (devices, model)])


def milliseconds(timeline: Timeline | None) -> float | None:
    """Of a step, by its span; None if there is none."""
    return None if timeline is None else 1000 * float(timeline.span)


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
        " Ours are simulated spans on H100 costs, OptPipe's from a search of a few seconds.",
    )


def _fastest(row: Row) -> str:
    there = {method: time for method, time in row.ours.items() if time is not None}
    # OptPipe starts from the baselines: where it finds nothing better, both have the same schedule.
    return min(reversed(there), key=lambda method: there[method])


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


def toy(micro_batches: int) -> dict[str, Timeline]:
    """Figure 4's methods."""
    from debubble.solver.optimize import optimize

    problem = _toy_problem(micro_batches)
    *_, kept = optimize(replace(problem, offload=False), effort=20.0)
    *_, best = optimize(problem, effort=20.0)
    return {
        "no offload, optimal": simulate(kept.schedule, problem.costs),
        "PipeOffload": simulate(pipe_offload(problem.costs, micro_batches), problem.costs),
        "AdaOffload": simulate(ada_offload(problem.costs, micro_batches), problem.costs),
        "OptPipe, optimal" if best.optimal else "OptPipe": simulate(best.schedule, problem.costs),
    }


def _toy_table(toys: dict[int, dict[str, Timeline]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for m, methods in toys.items():
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
        note="The figure's numbers are missing from the text; it says that OptPipe uses more of the memory there is."
        " The room is fitted to Table 1: it exceeds an H100's where we count more bytes per sample than they keep.",
    )


def _many_micro_batches() -> Table:
    """Figure 6: 7.1B on 8 GPUs, micro-batch size 8."""
    samples = room(8, "7.1B")
    rows: list[tuple[Cell, ...]] = []
    for m in (16, 32, 64, 128, 256):
        setting = Setting(8, "7.1B", m, 8)
        theirs = milliseconds(attempt(setting, "PipeOffload", samples))
        ours = milliseconds(searched(setting, samples))
        saved = None if ours is None or theirs is None else round(100 * (1 - ours / theirs), 1)
        rows.append((m, theirs and round(theirs, 1), ours and round(ours, 1), saved))
    return Table(
        title="Figure 6: 7.1B on 8 GPUs, size 8, by number of micro-batches",
        columns=("micro-batches", "PipeOffload ms", "OptPipe ms", "saved percent"),
        rows=tuple(rows),
        basis="measured",
        note="The paper claims about 17% at 256. Here an activation takes 6 to 7 forwards over PCIe (the smaller the"
        " hidden size, the more), and PipeOffload, which moves nearly all, waits for the link.",
    )
