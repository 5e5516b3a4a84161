"""OptPipe's Table 1 and Figures 4 to 6, compared with our results.

Table 1 is measured and partly implausible (see its note), so ours confirms only what follows from the schedules: which
method runs out of memory in which setting, and how OptPipe compares with every baseline that fits.  Besides the
paper's baselines there are AdaOffload and, under the same limit, `zb` and V-shaped schedules, which do not offload.
Comparing sentences are computed from their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from multiprocessing import get_context

from debubble.costs.devices.known_hardware import GIB
from debubble.ir import Kind, Schedule, StageCosts
from debubble.papers.optpipe.figures.runs import (
    AS_PRINTED,
    BASELINES,
    LIMITED,
    METHODS,
    Setting,
    attempt,
    fitted_samples,
    limited_schedule,
    placement_of,
    searched,
)
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Table
from debubble.processes import available_cores
from debubble.schedules import schedules
from debubble.search.problem import OrderProblem
from debubble.simulator import Timeline, simulate

PAPER = PrintedPaper.load("optpipe")

TOY_DEVICES = 4
"""Number of devices of Figure 4's toy example."""
V_SHAPE = "V-shape limited"
LIMITED_AND_OPTPIPE = (*AS_PRINTED, *LIMITED, "OptPipe")
OURS = (*METHODS, *(method for method in LIMITED if method not in METHODS), *AS_PRINTED)
"""All simulated methods: the paper's, others that respect the limit, and two with the rules as printed."""
PRINTED: Mapping[Setting, Mapping[str, float | None]] = {
    Setting(g, model, m, b): {name: None if t == "OOM" else t for name, t in zip(METHODS, times, strict=True)}
    for g, model, m, b, times in PAPER.printed["table-1"]
}


@dataclass(frozen=True)
class Row:
    """One setting with the paper's times in ms and our timelines."""

    setting: Setting
    printed: Mapping[str, float | None]
    timelines: Mapping[str, Timeline]
    """Our timelines of the methods that fit."""

    @property
    def ours(self) -> Mapping[str, float | None]:
        """Method -> our step time in ms; None if it does not fit."""
        return {method: milliseconds(self.timelines.get(method)) for method in OURS}

    @property
    def fastest_baseline(self) -> str | None:
        """Our fastest method besides OptPipe; None if nothing else fits."""
        times = {method: time for method, time in self.ours.items() if method != "OptPipe" and time is not None}
        return min(times, key=lambda method: times[method], default=None)


FIGURE_6 = tuple(Setting(8, "7.1B", m, 8) for m in (16, 32, 64, 128, 256))


@cache
def row(setting: Setting) -> Row:
    """One row of Table 1, or of Figure 6."""
    samples = capacity(setting.devices, setting.model)
    baselines = (method for method in OURS if method != "OptPipe")
    timelines = {m: t for m in baselines if (t := attempt(setting, m, samples)) is not None}
    result = searched(setting, samples)
    if result is not None:
        timelines["OptPipe"] = result
    return Row(setting, PRINTED.get(setting, {}), timelines)


def rows_of(settings: Iterable[Setting]) -> tuple[Row, ...]:
    """The rows of several settings, computed on all cores because each takes minutes."""
    with ProcessPoolExecutor(max_workers=available_cores(), mp_context=get_context("spawn")) as pool:
        return tuple(pool.map(row, settings))


@cache
def capacity(devices: int, model: str) -> float:
    """Capacity of a device in samples, fitted to the paper's out-of-memory pattern."""
    return fitted_samples([(s, theirs) for s, theirs in PRINTED.items() if (s.devices, s.model) == (devices, model)])


def milliseconds(timeline: Timeline | None) -> float | None:
    """Step time in ms, by the span; None without a timeline."""
    return None if timeline is None else 1000 * float(timeline.span)


def _named(row: Row) -> tuple[Cell, ...]:
    s = row.setting
    return s.devices, s.model, s.micro_batches, s.size


def _rounded(time: float | None) -> str:
    return "OOM" if time is None else str(round(time))


def times(rows: tuple[Row, ...]) -> Table:
    """Iteration times, printed / ours."""

    def cell(row: Row, method: str) -> str:
        return f"{_rounded(row.printed[method])} / {_rounded(row.ours[method])}"

    return PAPER.table("times", tuple((*_named(r), *(cell(r, m) for m in METHODS)) for r in rows))


def memory_pattern(rows: tuple[Row, ...]) -> Table:
    """The cells in which the paper's and our results differ in running out of memory."""
    cells = [(r, m) for r in rows for m in METHODS]
    different = [(r, m) for r, m in cells if (r.printed[m] is None) != (r.ours[m] is None)]
    listed = tuple(
        (*_named(r), m, "OOM" if r.printed[m] is None else "runs", "OOM" if r.ours[m] is None else "runs")
        for r, m in different
    )
    return PAPER.table("memory-pattern", listed, same=len(cells) - len(different), cells=len(cells))


def advantage(rows: tuple[Row, ...]) -> Table:
    """OptPipe compared with the fastest baseline and with the methods that respect the limit."""
    slower = [name for name in OURS if name != "OptPipe" and any(is_beaten(r, name) for r in rows)]
    beaten = sum(any(is_beaten(r, name) for name in slower) for r in rows)
    saved = [gain for r in rows if (gain := saving(r, r.fastest_baseline)) is not None]
    over = sum(_needed(r) > r.setting.device_memory for r in rows if "OptPipe" in r.timelines)
    than = f"slower than {' or '.join(slower)} in {beaten}" if slower else "slower than a baseline in 0"
    return PAPER.table(
        "advantage",
        tuple(
            (
                *_named(r),
                _rounded(r.ours["OptPipe"]),
                *(_rounded(r.ours[method]) for method in (*AS_PRINTED, *LIMITED)),
                saving(r, PIPEOFFLOAD),
                r.fastest_baseline,
                saving(r, r.fastest_baseline),
                _peak(r),
            )
            for r in rows
        ),
        than=than,
        count=len(rows),
        saved=format_range(saved),
        mean=sum(saved) / len(saved),
        none=saved.count(0),
        over=over,
    )


PIPEOFFLOAD, TUNED_PIPEOFFLOAD = next(iter(AS_PRINTED)), "PipeOffload"
"""The paper's PipeOffload, and our tuned one, which is never slower."""


def rich_and_limited(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The memory-rich rows (another baseline fits in the paper), and the memory-limited ones."""
    rich = [r for r in rows if any(r.printed.get(m) is not None for m in BASELINES)]
    return rich, [r for r in rows if r not in rich]


def savings(rows: Sequence[Row], method: str) -> list[float]:
    """Time saved over a method in percent, for rows where it and OptPipe fit."""
    return [gain for r in rows if (gain := saving(r, method)) is not None]


def printed_losses(rows: Sequence[Row]) -> list[float]:
    """Percent by which the printed OptPipe is slower than the fastest printed baseline, for rows where it is slower."""
    fastest = [(r.printed["OptPipe"], min(t for m, t in r.printed.items() if t and m != "OptPipe")) for r in rows]
    return [100 * (optpipe / best - 1) for optpipe, best in fastest if optpipe is not None and optpipe > best]


def format_range(percents: Sequence[float]) -> str:
    """Format the range of some percentages, such as `3 to 5%`."""
    return " to ".join(f"{p:g}" for p in sorted({min(percents), max(percents)})) + "%" if percents else "nothing"


def is_beaten(row: Row, method: str) -> bool:
    """Tell whether OptPipe is slower than a method that fits."""
    optpipe, other = row.ours["OptPipe"], row.ours[method]
    return other is not None and (optpipe is None or other < optpipe * (1 - 1e-9))


def saving(row: Row, method: str | None) -> float | None:
    """Time that OptPipe saves over a baseline in percent; None if one of the two does not fit."""
    optpipe, other = row.ours["OptPipe"], None if method is None else row.ours[method]
    return None if optpipe is None or other is None else round(100 * (1 - optpipe / other), 1) + 0.0


def _needed(row: Row) -> float:
    return max(map(float, row.timelines["OptPipe"].peak_memory))


def _peak(row: Row) -> str | None:
    if "OptPipe" not in row.timelines:
        return None
    needed, available = _needed(row), row.setting.device_memory
    why = f", the capacity is fitted and the device has {available / GIB:.0f}" if needed > available else ""
    return f"{needed / GIB:.1f}{why}"


def _toy_problem(micro_batches: int, schedule: str) -> OrderProblem:
    """The toy example for a schedule's placement; a device's forward takes 1 in total."""
    placement = placement_of(schedule, TOY_DEVICES)
    share = Fraction(TOY_DEVICES, placement.stages)
    costs = StageCosts.of(
        stages=placement.stages,
        forward=share,
        backward_input=share,
        backward_weight=share,
        activation=2 * share,
        activation_after_input=share,
        offload=share,
        memory_limit=6,
    )
    return OrderProblem(placement=placement, micro_batches=micro_batches, costs=costs, offload=True)


def toy(micro_batches: int) -> dict[str, Timeline]:
    """Figure 4's methods on the toy example."""
    problem, v_shape = (_toy_problem(micro_batches, name) for name in ("1f1b", "zb-v"))
    limited = {method: _fastest(names, micro_batches) for method, names in LIMITED.items()}
    in_v = limited.pop(V_SHAPE)
    return {
        **{f"{name} as printed": simulate(rule, problem.costs) for name, rule in printed_rules(micro_batches).items()},
        **limited,
        **_optimized("OptPipe", problem, [timeline.program.schedule for timeline in limited.values()]),
        V_SHAPE: in_v,
        **_optimized("OptPipe in a V", v_shape, [in_v.program.schedule]),
    }


def printed_rules(m: int) -> dict[str, Schedule]:
    """The schedules of PipeOffload and AdaOffload with the rules as printed."""
    entries, costs = ("PipeOffload", "AdaOffload"), _toy_problem(m, "1f1b").costs
    return {
        name: schedules[name.lower()](devices=TOY_DEVICES, micro_batches=m, chunks=1, costs=costs, variant="paper")
        for name in entries
    }


def forwards_first(schedule: Schedule) -> list[int]:
    """Number of forwards before the first backward, per device."""
    kinds = ([op.kind for op in order if op.kind in (Kind.F, Kind.I, Kind.B)] for order in schedule.orders)
    return [next(index for index, kind in enumerate(order) if kind is not Kind.F) for order in kinds]


def _fastest(names: Sequence[str], micro_batches: int) -> Timeline:
    """The fastest of some schedules that respect the memory limit."""
    problems = {name: _toy_problem(micro_batches, name) for name in names}
    timelines = (
        simulate(limited_schedule(name, problem.costs, TOY_DEVICES, micro_batches, objective="makespan"), problem.costs)
        for name, problem in problems.items()
    )
    return min(timelines, key=lambda timeline: timeline.makespan)


def _optimized(name: str, problem: OrderProblem, starts: Sequence[Schedule]) -> dict[str, Timeline]:
    """The best order that the search finds; its name says whether optimality is proven."""
    from debubble.search.optimize import optimize

    *_, best = optimize(problem, starts=starts, effort=20.0)
    return {f"{name}, optimal" if best.optimal else name: simulate(best.schedule, problem.costs)}


def toy_table(toys: Mapping[int, Mapping[str, Timeline]]) -> Table:
    """Figure 4: makespan and idle time of every method."""
    rows: list[tuple[Cell, ...]] = []
    saved: dict[str, list[int]] = {}
    for m, methods in toys.items():
        idle = {name: float(timeline.makespan - 3 * m) for name, timeline in methods.items()}
        names = list(idle)
        position = next(position for position, name in enumerate(names) if name.startswith("OptPipe"))
        for rivals in (names[: position + 1], names[position + 1 :]):
            *baselines, optpipe = rivals
            for name in baselines:
                saved.setdefault(name, []).append(round(100 * (1 - idle[optpipe] / idle[name])) if idle[name] else 0)
        rows += [(m, name, float(methods[name].makespan), idle[name]) for name in idle]
    against = ", ".join(f"{format_range(gains)} against {name}" for name, gains in saved.items())
    halved = all(gain >= 50 for name in saved if name.endswith("as printed") for gain in saved[name])
    return PAPER.table("toy-table", rows, basis="exact" if halved else "measured", against=against)


def settings_of_figure_5(rows: Sequence[Row]) -> list[Row]:
    """The settings with 16 and 32 micro-batches in which OptPipe and PipeOffload fit."""
    both = (PIPEOFFLOAD, "OptPipe")
    return [r for r in rows if r.setting.micro_batches in (16, 32) and all(method in r.timelines for method in both)]


def peaks(row: Row, method: str) -> tuple[float, float, float]:
    """The minimum, average and maximum peak over the devices, in GiB."""
    device_peaks = [float(peak) / GIB for peak in row.timelines[method].peak_memory]
    return min(device_peaks), sum(device_peaks) / len(device_peaks), max(device_peaks)


def memory_use(rows: Sequence[Row]) -> Table:
    """Figure 5: minimum, average and maximum peak over the devices, in GiB."""
    cells: list[tuple[Cell, ...]] = []
    more = 0
    for row in rows:
        figures = (
            " ".join(f"{gib:.1f}" for gib in peaks(row, method)) if method in row.timelines else None
            for method in LIMITED_AND_OPTPIPE
        )
        memory = row.setting.device_memory
        over = f"no, the capacity is fitted and the device has {memory / GIB:.0f}" if _needed(row) > memory else "yes"
        cells.append((*_named(row), *figures, over))
        more += peaks(row, "OptPipe")[1] > peaks(row, PIPEOFFLOAD)[1]
    return PAPER.table(
        "memory-use",
        tuple(cells),
        more=more,
        count=len(rows),
    )


def micro_batch_scaling(rows: tuple[Row, ...]) -> Table:
    """Figure 6: 7.1B on 8 GPUs, micro-batch size 8."""
    cells = tuple(
        (
            r.setting.micro_batches,
            *(None if (t := r.ours[m]) is None else round(t, 1) for m in LIMITED_AND_OPTPIPE),
            saving(r, PIPEOFFLOAD),
            saving(r, TUNED_PIPEOFFLOAD),
            saving(r, r.fastest_baseline),
            _peak(r),
        )
        for r in rows
    )
    last = rows[-1]
    against, fastest = (
        [gain for r in rows if (gain := saving(r, method or r.fastest_baseline)) is not None]
        for method in (PIPEOFFLOAD, None)
    )
    rivals = " or ".join(sorted({method for r in rows if (method := r.fastest_baseline) is not None}))
    return PAPER.table(
        "many-micro-batches",
        cells,
        saving=saving(last, PIPEOFFLOAD),
        saved=format_range(against),
        rivals=rivals,
        fastest=format_range(fastest),
    )
