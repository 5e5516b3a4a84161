"""OptPipe's Table 1 and Figures 4 to 6 next to ours.

Table 1 is a measurement and partly implausible (see its note), so ours confirms what follows from schedules alone:
which method runs out of memory where, and how the optimised schedule compares with every baseline that fits.  Next to
the paper's baselines stand AdaOffload and, under the same limit, `zb` and the schedules in a V, which move nothing.
Every sentence that compares is computed from the rows next to it.
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

PAPER = PrintedPaper.of("optpipe")

TOY = 4
"""Figure 4's devices."""
V_SHAPE = "V-shape limited"
LIMITED_AND_OPTPIPE = (*AS_PRINTED, *LIMITED, "OptPipe")
OURS = (*METHODS, *(method for method in LIMITED if method not in METHODS), *AS_PRINTED)
"""All that is simulated: the paper's methods, what else takes the limit into its order, and two rules as printed."""
PRINTED: Mapping[Setting, Mapping[str, float | None]] = {
    Setting(g, model, m, b): {name: None if t == "OOM" else t for name, t in zip(METHODS, times, strict=True)}
    for g, model, m, b, times in PAPER.printed["table-1"]
}


@dataclass(frozen=True)
class Row:
    """One setting with what the paper printed and what we found, in ms."""

    setting: Setting
    printed: Mapping[str, float | None]
    timelines: Mapping[str, Timeline]
    """Ours, of the methods that fit the room."""

    @property
    def ours(self) -> Mapping[str, float | None]:
        """Milliseconds of a step; None where memory runs out."""
        return {method: milliseconds(self.timelines.get(method)) for method in OURS}

    @property
    def fastest_baseline(self) -> str | None:
        """The fastest of ours but OptPipe; None if nothing else fits."""
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
    """The rows of several settings, which take minutes of one core: every core computes some."""
    with ProcessPoolExecutor(max_workers=available_cores(), mp_context=get_context("spawn")) as pool:
        return tuple(pool.map(row, settings))


@cache
def capacity(devices: int, model: str) -> float:
    """Samples whose activations fit a device, fitted to the paper's pattern of what runs out of memory."""
    return fitted_samples([(s, theirs) for s, theirs in PRINTED.items() if (s.devices, s.model) == (devices, model)])


def milliseconds(timeline: Timeline | None) -> float | None:
    """Time of a step, by its span; None if there is none."""
    return None if timeline is None else 1000 * float(timeline.span)


def _named(row: Row) -> tuple[Cell, ...]:
    s = row.setting
    return s.devices, s.model, s.micro_batches, s.size


def _rounded(time: float | None) -> str:
    return "OOM" if time is None else str(round(time))


def times(rows: tuple[Row, ...]) -> Table:
    """Iteration times as printed next to ours."""

    def cell(row: Row, method: str) -> str:
        return f"{_rounded(row.printed[method])} / {_rounded(row.ours[method])}"

    return PAPER.table("times", tuple((*_named(r), *(cell(r, m) for m in METHODS)) for r in rows))


def memory_pattern(rows: tuple[Row, ...]) -> Table:
    """The cells in which the paper's method and ours differ in running out of memory."""
    cells = [(r, m) for r in rows for m in METHODS]
    different = [(r, m) for r, m in cells if (r.printed[m] is None) != (r.ours[m] is None)]
    listed = tuple(
        (*_named(r), m, "OOM" if r.printed[m] is None else "runs", "OOM" if r.ours[m] is None else "runs")
        for r, m in different
    )
    return PAPER.table("memory-pattern", listed, same=len(cells) - len(different), cells=len(cells))


def advantage(rows: tuple[Row, ...]) -> Table:
    """OptPipe next to the fastest baseline, what takes the limit into its order apart."""
    slower = [name for name in OURS if name != "OptPipe" and any(is_slower(r, name) for r in rows)]
    beaten = sum(any(is_slower(r, name) for name in slower) for r in rows)
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
        saved=span_of(saved),
        mean=sum(saved) / len(saved),
        none=saved.count(0),
        over=over,
    )


PIPEOFFLOAD, TUNED = next(iter(AS_PRINTED)), "PipeOffload"
"""The paper's PipeOffload, and ours, which is never slower."""


def rich_and_limited(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows where another baseline fits in the paper, and the others."""
    rich = [r for r in rows if any(r.printed.get(m) is not None for m in BASELINES)]
    return rich, [r for r in rows if r not in rich]


def savings(rows: Sequence[Row], method: str) -> list[float]:
    """Percents saved against a method, where it and OptPipe fit."""
    return [gain for r in rows if (gain := saving(r, method)) is not None]


def losses_in_print(rows: Sequence[Row]) -> list[float]:
    """Percents by which the paper's own OptPipe is slower than the fastest other of its table, where it is."""
    fastest = [(r.printed["OptPipe"], min(t for m, t in r.printed.items() if t and m != "OptPipe")) for r in rows]
    return [100 * (own / best - 1) for own, best in fastest if own is not None and own > best]


def span_of(percents: Sequence[float]) -> str:
    """The least and the greatest of some percentages, in words."""
    return " to ".join(f"{each:g}" for each in sorted({min(percents), max(percents)})) + "%" if percents else "nothing"


def is_slower(row: Row, method: str) -> bool:
    """Tell whether OptPipe is slower than a baseline."""
    own, other = row.ours["OptPipe"], row.ours[method]
    return other is not None and (own is None or other < own * (1 - 1e-9))


def saving(row: Row, method: str | None) -> float | None:
    """Percent of a baseline's time; None if one of the two does not fit."""
    own, other = row.ours["OptPipe"], None if method is None else row.ours[method]
    return None if own is None or other is None else round(100 * (1 - own / other), 1) + 0.0


def _needed(row: Row) -> float:
    return max(map(float, row.timelines["OptPipe"].peak_memory))


def _peak(row: Row) -> str | None:
    if "OptPipe" not in row.timelines:
        return None
    needed, there = _needed(row), row.setting.device_memory
    why = f", for the room is fitted: the device has {there / GIB:.0f}" if needed > there else ""
    return f"{needed / GIB:.1f}{why}"


def _toy_problem(micro_batches: int, schedule: str) -> OrderProblem:
    """Devices that take 1 for a forward, divided among the stages that a schedule gives them."""
    placement = placement_of(schedule, TOY)
    share = Fraction(TOY, placement.stages)
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
    """Figure 4's methods."""
    problem, v_shape = (_toy_problem(micro_batches, name) for name in ("1f1b", "zb-v"))
    limited = {method: _fastest(names, micro_batches) for method, names in LIMITED.items()}
    in_v = limited.pop(V_SHAPE)
    return {
        **{f"{name} as printed": simulate(each, problem.costs) for name, each in printed_rules(micro_batches).items()},
        **limited,
        **_optimized("OptPipe", problem, [timeline.program.schedule for timeline in limited.values()]),
        V_SHAPE: in_v,
        **_optimized("OptPipe in a V", v_shape, [in_v.program.schedule]),
    }


def printed_rules(micro_batches: int) -> dict[str, Schedule]:
    """The rules of PipeOffload and AdaOffload as printed."""
    entries, costs = ("PipeOffload", "AdaOffload"), _toy_problem(micro_batches, "1f1b").costs
    return {
        name: schedules[name.lower()](devices=TOY, micro_batches=micro_batches, chunks=1, costs=costs, variant="paper")
        for name in entries
    }


def forwards_first(schedule: Schedule) -> list[int]:
    """The forwards of each device before its first backward."""
    kinds = ([op.kind for op in order if op.kind in (Kind.F, Kind.I, Kind.B)] for order in schedule.orders)
    return [next(at for at, kind in enumerate(each) if kind is not Kind.F) for each in kinds]


def _fastest(names: Sequence[str], micro_batches: int) -> Timeline:
    """The fastest of some schedules that take the memory limit into their order."""
    problems = {name: _toy_problem(micro_batches, name) for name in names}
    timelines = (
        simulate(limited_schedule(name, each.costs, TOY, micro_batches, objective="makespan"), each.costs)
        for name, each in problems.items()
    )
    return min(timelines, key=lambda timeline: timeline.makespan)


def _optimized(name: str, problem: OrderProblem, starts: Sequence[Schedule]) -> dict[str, Timeline]:
    """The best order that the search finds, under a name that says whether it is proven optimal."""
    from debubble.search.optimize import optimize

    *_, best = optimize(problem, starts=starts, effort=20.0)
    return {f"{name}, optimal" if best.optimal else name: simulate(best.schedule, problem.costs)}


def toy_table(toys: Mapping[int, Mapping[str, Timeline]]) -> Table:
    """Figure 4: how long each method takes, and how long its devices are idle."""
    rows: list[tuple[Cell, ...]] = []
    saved: dict[str, list[int]] = {}
    for m, methods in toys.items():
        idle = {name: float(timeline.makespan - 3 * m) for name, timeline in methods.items()}
        names = list(idle)
        at = next(at for at, name in enumerate(names) if name.startswith("OptPipe"))
        for rivals in (names[: at + 1], names[at + 1 :]):
            *others, own = rivals
            for name in others:
                saved.setdefault(name, []).append(round(100 * (1 - idle[own] / idle[name])) if idle[name] else 0)
        rows += [(m, name, float(methods[name].makespan), idle[name]) for name in idle]
    against = ", ".join(f"{span_of(each)} against {name}" for name, each in saved.items())
    halved = all(gain >= 50 for name in saved if name.endswith("as printed") for gain in saved[name])
    return PAPER.table("toy-table", rows, basis="exact" if halved else "measured", against=against)


def settings_of_figure_5(rows: Sequence[Row]) -> list[Row]:
    """The settings with 16 and 32 micro-batches in which OptPipe and PipeOffload fit."""
    both = (PIPEOFFLOAD, "OptPipe")
    return [r for r in rows if r.setting.micro_batches in (16, 32) and all(method in r.timelines for method in both)]


def peaks(row: Row, method: str) -> tuple[float, float, float]:
    """The least, average and greatest peak over the devices, in GiB."""
    each = [float(peak) / GIB for peak in row.timelines[method].peak_memory]
    return min(each), sum(each) / len(each), max(each)


def memory_use(rows: Sequence[Row]) -> Table:
    """Figure 5: least, average and greatest peak over the devices, in GiB."""
    cells: list[tuple[Cell, ...]] = []
    more = 0
    for row in rows:
        figures = (
            " ".join(f"{gib:.1f}" for gib in peaks(row, method)) if method in row.timelines else None
            for method in LIMITED_AND_OPTPIPE
        )
        there = row.setting.device_memory
        over = f"no, the room is fitted: the device has {there / GIB:.0f}" if _needed(row) > there else "yes"
        cells.append((*_named(row), *figures, over))
        more += peaks(row, "OptPipe")[1] > peaks(row, PIPEOFFLOAD)[1]
    return PAPER.table(
        "memory-use",
        tuple(cells),
        more=more,
        count=len(rows),
    )


def many_micro_batches(rows: tuple[Row, ...]) -> Table:
    """Figure 6: 7.1B on 8 GPUs, micro-batch size 8."""
    cells = tuple(
        (
            r.setting.micro_batches,
            *(None if (t := r.ours[m]) is None else round(t, 1) for m in LIMITED_AND_OPTPIPE),
            saving(r, PIPEOFFLOAD),
            saving(r, TUNED),
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
        saved=span_of(against),
        rivals=rivals,
        fastest=span_of(fastest),
    )
