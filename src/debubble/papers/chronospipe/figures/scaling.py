"""ChronosPipe, Figures 13 to 16: P2P overhead, scaling of Chronos-Offload, more than two chunks."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from debubble.ir import StageCosts
from debubble.papers.chronospipe.figures import planner_runs
from debubble.papers.chronospipe.figures.memory_model import (
    CHRONOS,
    HALF,
    HOST_STEP,
    MESSAGE,
    PLAIN,
    RECOMP,
    Method,
    percent,
)
from debubble.papers.chronospipe.figures.messages import MESSAGES
from debubble.papers.chronospipe.offload import hidden_share, offload_states, step_window
from debubble.papers.chronospipe.schedule import follow_timetable, periodic, timetable_spec
from debubble.papers.chronospipe.timetable import timetables
from debubble.papers.drawings import Bars, Lines
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Exhibit, number
from debubble.schedules import schedules
from debubble.simulator import simulate

PAPER = PrintedPaper.load("chronospipe")


def figure_13() -> Iterator[Exhibit]:
    """P2P overhead."""
    printed = {PLAIN: _printed_fraction(2 * 4 + 4 * 62), CHRONOS: _printed_fraction(4 * 4 + 8 * 62 + 2)}
    ours = {
        method: [round(method.run(4, 64, message=MESSAGE, model=model).ideal_fraction, 4) for model in MESSAGES]
        for method in (PLAIN, CHRONOS, HALF, RECOMP)
    }
    below = 100 * (ours[PLAIN][0] - ours[CHRONOS][0])
    lost = [100 * (before - after) for before, after in zip(ours[HALF], ours[RECOMP], strict=True)]
    yield PAPER.claim(
        "figure-13.ideal-fraction",
        [ours[method][0] for method in printed],
        printed=[f"{fraction:.4f}" for fraction in printed.values()],
    )
    yield PAPER.claim("figure-13.derived", [below])
    yield PAPER.claim("figure-13.measured", [below])
    yield PAPER.claim("figure-13.recomputation", [lost[1]])
    table = PAPER.table(
        "figure-13",
        tuple((method.name, printed.get(method), *fractions) for method, fractions in ours.items()),
        blocking=lost[0],
        receiver=lost[1],
        asynchronous=lost[2],
    )
    yield table
    yield table.bars("ideal computation fraction", table.columns[2:])


def _printed_fraction(messages: int) -> float:
    """6 m over the total time of section 4.1 (p = 4, m = 64), which has no formula for recomputation with messages."""
    return round(float(6 * 64 / (6 * (64 + 4 - 1) + messages * MESSAGE)), 4)


def figure_14() -> Iterator[Exhibit]:
    """Scaling of Chronos-Offload."""
    rows = []
    longer_by = planner_runs.forward_time(8192) / planner_runs.forward_time(4096)
    settings = (("PP4, 4K", 4, 1.0), ("PP8, 4K", 8, 1.0), ("PP4, 8K", 4, longer_by), ("PP8, 8K", 8, longer_by))
    for (name, p, scale), published in zip(settings, (*PAPER.printed["figure-14"], None), strict=True):
        # In T_unit of a chunk: doubling the stages halves both the compute and the parameters of a chunk.
        costs = StageCosts.of(stages=2 * p, host_step=float(HOST_STEP) / scale)
        made = schedules["chronos"](devices=p, micro_batches=32, chunks=2, costs=costs)
        run = simulate(offload_states(made, chunks=[1]), costs)
        longer = float(run.makespan) / (6 * (32 + p - 1)) - 1
        rows.append((name, published, percent(hidden_share(run)), percent(longer)))
    ours = [number(hidden) for _, _, hidden, _ in rows]
    yield PAPER.claim("figure-14.hidden", ours[:3], by=longer_by)
    table = PAPER.table("figure-14", rows, by=longer_by)
    yield table
    yield Bars(
        title=table.title,
        groups=[name for name, *_ in rows],
        series={"ours": ours},
        paper={"ours": [None if published is None else number(published) for _, published, *_ in rows]},
        unit="percent",
    )


def figure_15() -> Iterator[Exhibit]:
    """Chronos-Recomp with more chunks."""
    rows = []
    for v in (2, 3, 4):
        for n in range(v + 1):
            made = periodic("", devices=4, micro_batches=24, chunks=v, recompute=dict.fromkeys(range(n), 1))
            stored = Fraction(max(sum(counts[n:]) for counts in made.in_flight(0)), 4 * v)
            rows.append((v, percent(n / v), percent(float(stored)), percent(1 - n / v)))
    stored_percent = {(v, number(share)): number(chronos) for v, share, chronos, _ in rows}
    shares = sorted({share for _, share in stored_percent})
    yield PAPER.claim("figure-15.kept", [stored_percent[4, 25]])
    never = all(number(chronos) <= number(plain) for *_, chronos, plain in rows)
    yield PAPER.claim("figure-15.never-more", never)
    table = PAPER.table("figure-15", rows)
    yield table
    yield Lines(
        title=table.title,
        across="layers that recompute, percent",
        x=shares,
        series={
            **{f"{v} chunks": [stored_percent.get((v, share)) for share in shares] for v in (2, 3, 4)},
            "1F1B": [100 - share for share in shares],
        },
        unit="percent of m_a",
    )


HOST_TIMES = (8, 16, 24, 32, 48)
"""Times of D and S for all of a device's parameters, in T_unit."""


def figure_16() -> Iterator[Exhibit]:
    """Chronos-Offload with more chunks."""
    idle = {
        v: step_window(Method("", "chronos", v).run(4, 24), device=0, chunk=v - 1) / Fraction(4, v) for v in (2, 3, 4)
    }
    device_states = {v: [percent(1 - 2 / 3 * hosted_chunks(v, time) / v) for time in HOST_TIMES] for v in idle}
    like_three, peak_share, min_peak = _order_of_four(float(idle[3]))
    yield PAPER.claim(
        "figure-16.idle-backwards",
        [float(idle[3] / 2), like_three / 2],
        peak_share=100 * peak_share,
        least=100 * min_peak,
        idle=float(idle[4] / 2),
    )
    two, three, four = (number(shares[0]) for shares in device_states.values())
    diminish = four < two and four - three > three - two
    yield PAPER.claim("figure-16.returns", "diminishing returns" if diminish else "returns that do not diminish")
    published = PAPER.printed["figure-16"]
    yield PAPER.table(
        "figure-16", tuple((v, published[str(v)], float(idle[v] / 2), int(idle[v]), *device_states[v]) for v in idle)
    )
    yield Lines(
        title="Figure 16: model states kept at PP4, as many deep chunks on the host as lose no time",
        across="time of the host for a device's parameters, T_unit",
        x=HOST_TIMES,
        series={f"{v} chunks": list(map(number, shares)) for v, shares in device_states.items()},
        unit="percent",
    )


def _order_of_four(target: float) -> tuple[float, float, float]:
    """Idle backwards and peak of the four-chunk timetable closest to `target` idle backwards, and the lowest peak."""
    results = []
    costs = StageCosts.of(stages=16, activation=Fraction(1, 16))
    for timetable in timetables(timetable_spec(costs, devices=4, chunks=4, shares={})):
        run = simulate(follow_timetable("chronos", timetable, 24), costs)
        idle = float(step_window(run, device=0, chunk=3)) / 2
        results.append((abs(idle - target), float(run.peak_memory[0]), idle))
    _, peak_share, idle = min(results)
    return idle, peak_share, min(peak for _, peak, _ in results)


def hosted_chunks(chunks: int, time: int) -> int:
    """The largest number of deep chunks whose states can be offloaded at PP4 without lengthening the step.

    Args:
        chunks: Chunks per device.
        time: Time of D and S for all of a device's chunks, in T_unit.
    """
    f = Fraction(2, chunks)
    costs = StageCosts.of(
        stages=4 * chunks, forward=f, backward_input=f, backward_weight=f, host_step=Fraction(time, chunks)
    )
    made = schedules["chronos"](devices=4, micro_batches=24, chunks=chunks, costs=costs)
    plain = simulate(made, costs).makespan
    fitting = (
        simulate(offload_states(made, chunks=range(chunks - n, chunks)), costs).makespan <= plain
        for n in range(1, chunks + 1)
    )
    return next((n for n, fits in enumerate(fitting) if not fits), chunks)
