"""ChronosPipe's equations and Figures 13 to 16, which follow from its schedules alone, beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from debubble.ir import Kind, Op, StageCosts
from debubble.ir.stage_costs import CommunicationModel
from debubble.reproduce.chronospipe.memory_model import CHRONOS, HALF, MESSAGE, PLAIN, RECOMP, Method, percent
from debubble.reproduce.registry import Cell, Table
from debubble.schedules import schedules
from debubble.schedules.chronos.offload import (
    available_offload,
    available_upload,
    hidden_share,
    offload_states,
    step_window,
    upload_window,
)
from debubble.schedules.chronos.schedule import delay_rounds, periodic
from debubble.simulator import simulate

MODELS: tuple[CommunicationModel, ...] = ("blocking", "receiver", "latency")


def peaks() -> Table:
    """Section 4: peaks and times of every p."""
    rows = []
    for p in (4, 8, 12, 16):
        m = 64
        run, recomp = CHRONOS.run(p, m), RECOMP.run(p, m)
        rows.append(
            (p, 6 * (m + p - 1), int(run.makespan), percent(float(run.peak_memory[0])), 6 * p + 7 * (m - 1),
             int(recomp.makespan), percent(float(recomp.peak_memory[0])))
        )  # fmt: skip
    return Table(
        title="Section 4: time in T_unit at m = 64, and peak activations in % of m_a",
        columns=("p", "paper: Pipe", "ours", "ours: peak", "paper: Recomp", "ours", "ours: peak"),
        rows=tuple(rows),
        basis="modelled",
        note="Chronos-Pipe's times are the paper's; its time of Chronos-Recomp is an upper bound of ours. Its limits of"
        " the peaks for large p are 75% and 25%; ours include the block that is being recomputed.",
    )


def delays() -> Table:
    """Appendix A: k."""
    rows = tuple((p, 1 if 8 <= p <= 40 else 0, delay_rounds(p)) for p in (4, 8, 10, 12, 16, 24, 27, 32, 36, 40))
    return Table(
        title="Appendix A: rounds k by which Chronos-Recomp delays chunk 2",
        columns=("p", "its text", "its equation (8)"),
        rows=rows,
        basis="exact",
        note="The timetable needs what the equation says; the text ('k = 1 for 8 <= p <= 40') contradicts it.",
    )


def figure_13() -> Table:
    """The cost of messages."""
    rows: list[tuple[Cell, ...]] = []
    fractions: dict[Method, tuple[float, ...]] = {}
    for method in (PLAIN, CHRONOS, HALF, RECOMP):
        ours = fractions[method] = tuple(
            round(method.run(4, 64, message=MESSAGE, model=model).ideal_fraction, 4) for model in MODELS
        )
        rows.append((method.name, _printed_fraction(method, 4, 64), *ours))
    lost = [100 * (before - after) for before, after in zip(fractions[HALF], fractions[RECOMP], strict=True)]
    return Table(
        title="Figure 13: ideal computation fraction at PP4, m = 64, T_c = 0.104 T_unit",
        columns=("method", "paper's formula", "ours: blocking", "receiver waits", "asynchronous"),
        rows=tuple(rows),
        basis="modelled",
        note="Blocking: adjacent messages take both ends' compute lanes, those between chunks do not. Without"
        " recomputation they give the paper's formula. It measures a drop of 6 points from 1F1B to Chronos-Pipe and"
        f" derives 5, and at most 3 with recomputation. Ours is then {lost[0]:.1f} points with blocking messages,"
        f" {lost[1]:.1f} where the receiver waits and {lost[2]:.1f} with asynchronous ones.",
    )


def figure_14() -> Table:
    """The part of the host's step that is hidden."""
    fitted = 2 * available_offload(4) / 0.4545
    rows = []
    for name, p, scale, published in (
        ("PP4, 4K", 4, 1, "45.45%"),
        ("PP8, 4K", 8, 1, "94.55%"),
        ("PP4, 8K", 4, 2, "100%"),
        ("PP8, 8K", 8, 2, None),
    ):
        # Time in T_unit of a chunk: twice the stages halve a chunk's compute and its parameters alike.
        costs = StageCosts.of(stages=2 * p, host_step=fitted / scale)
        made = schedules["chronos"](devices=p, micro_batches=32, chunks=2, costs=costs)
        run = simulate(offload_states(made, chunks=[1]), costs)
        longer = float(run.makespan) / (6 * (32 + p - 1)) - 1
        rows.append((name, published, percent(hidden_share(run, chunk=1)), percent(longer)))
    return Table(
        title="Figure 14: share of the gradient offload and host step that fits into the cool-down's idle time",
        columns=("setting", "paper", "ours", "ours: longer step"),
        rows=tuple(rows),
        basis="fitted",
        note="Fitted: the time of the offloaded chunk's gradients and step, from the first row. Longer sequences count"
        " linearly; attention makes them longer than that. In our program the host also works beside the last"
        " backwards, so that even PP4 loses less than the idle time suggests.",
    )


def windows() -> Table:
    """Equations (4) and (6)."""
    rows = []
    for p in (4, 8, 12, 16):
        run = CHRONOS.run(p, 2 * p + 2)
        rows.append(
            (p, available_offload(p), int(step_window(run, device=0, chunk=1) / 2), available_upload(p),
             int(upload_window(run, device=0, chunk=1)))
        )  # fmt: skip
    return Table(
        title="Equations (4) and (6): idle time for Chronos-Offload, in T_bwd / 2p and T_fwd / 2p",
        columns=("p", "paper: cool-down", "simulated", "paper: warm-up", "simulated"),
        rows=tuple(rows),
        basis="exact",
    )


def figure_15() -> Table:
    """Recomputation of more chunks."""
    rows = []
    for v in (2, 3, 4):
        for n in range(v + 1):
            made = periodic("", devices=4, micro_batches=24, chunks=v, recompute=dict.fromkeys(range(n), 1))
            stored = Fraction(_stored_blocks(made.orders[0], 4 * n), 4 * v)
            rows.append((v, percent(n / v), percent(float(stored)), percent(1 - n / v)))
    return Table(
        title="Figure 15: activations kept at PP4, in % of m_a",
        columns=("chunks", "recomputed", "Chronos-Recomp", "1F1B"),
        rows=tuple(rows),
        basis="exact",
        note="Without the memory of the block that is being recomputed, as in the paper. With 4 chunks and 25%"
        " recomputed, 43.75% remain: the paper says that it is reduced 'by up to 43.75%'.",
    )


HOST_TIMES = (8, 16, 24, 32, 48)
"""Times of the host for all of a device's parameters, in T_unit."""


def figure_16() -> Table:
    """Offload with more chunks."""
    rows: list[tuple[Cell, ...]] = []
    for v, published in ((2, 1.0), (3, 1.5), (4, 1.5)):
        run = Method("", "chronos", v).run(4, 24)
        idle = step_window(run, device=0, chunk=v - 1) / Fraction(4, v)
        hosted = [hosted_chunks(v, time) for time in HOST_TIMES]
        rows.append((v, published, float(idle / 2), int(idle), *(percent(1 - 2 / 3 * n / v) for n in hosted)))
    return Table(
        title="Figure 16: idle backwards of one chunk in the cool-down at PP4, and states kept by the time of the host",
        columns=("chunks", "paper: of v = 2", "ours", "backwards", *(f"host {time}" for time in HOST_TIMES)),
        rows=tuple(rows),
        basis="modelled",
        note="With 4 chunks, the order that holds least activations has six idle backwards; orders that hold more have"
        " three, as the paper says. States kept: as many of the deepest chunks step on the host as lose no time, where"
        " gradients and step of a whole device take the host so many T_unit (a forward and backward take 6).",
    )


def hosted_chunks(chunks: int, time: int) -> int:
    """The most deep chunks at PP4 that step on the host without lengthening the step.

    Args:
        chunks: Chunks of a device.
        time: Of the host for gradients and step of all of a device's chunks, in T_unit.
    """
    each = Fraction(2, chunks)
    costs = StageCosts.of(
        stages=4 * chunks, forward=each, backward_input=each, backward_weight=each, host_step=Fraction(time, chunks)
    )
    made = schedules["chronos"](devices=4, micro_batches=24, chunks=chunks, costs=costs)
    plain = simulate(made, costs).makespan
    fitting = (
        simulate(offload_states(made, chunks=range(chunks - n, chunks)), costs).makespan <= plain
        for n in range(1, chunks + 1)
    )
    return next((n for n, fits in enumerate(fitting) if not fits), chunks)


def _stored_blocks(order: Sequence[Op], first: int) -> int:
    """Peak of a device in blocks of the stages from `first` on."""
    alive = most = 0
    for op in order:
        if op.stage >= first:
            alive += {Kind.F: 1, Kind.B: -1}.get(op.kind, 0)
            most = max(most, alive)
    return most


def _printed_fraction(method: Method, p: int, m: int) -> float | None:
    """6 m over the paper's total time (section 4.1); it prints none with recomputation and messages."""
    messages = {PLAIN: 2 * p + 4 * (m - 2), CHRONOS: 4 * p + 8 * (m - 2) + 2}
    if method not in messages:
        return None
    return round(float(6 * m / (6 * (m + p - 1) + messages[method] * MESSAGE)), 4)
