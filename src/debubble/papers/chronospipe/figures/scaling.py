"""ChronosPipe's Figures 13 to 16: messages, scaling of the offload, recomputation and offload of more chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from debubble.ir import Kind, Op, StageCosts
from debubble.papers.chronospipe.figures.memory_model import CHRONOS, HALF, MESSAGE, PLAIN, RECOMP, Method, percent
from debubble.papers.chronospipe.figures.messages import MESSAGES
from debubble.papers.chronospipe.offload import available_offload, hidden_share, offload_states, step_window
from debubble.papers.chronospipe.schedule import periodic
from debubble.papers.claims import compared, holds, stated
from debubble.papers.drawings import Bars, Lines
from debubble.papers.registry import Exhibit, Table, number
from debubble.schedules import schedules
from debubble.simulator import simulate


def figure_13() -> Iterator[Exhibit]:
    """Messages."""
    printed = {PLAIN: _printed_fraction(2 * 4 + 4 * 62), CHRONOS: _printed_fraction(4 * 4 + 8 * 62 + 2)}
    ours = {
        method: [round(method.run(4, 64, message=MESSAGE, model=model).ideal_fraction, 4) for model in MESSAGES]
        for method in (PLAIN, CHRONOS, HALF, RECOMP)
    }
    below = 100 * (ours[PLAIN][0] - ours[CHRONOS][0])
    lost = [100 * (before - after) for before, after in zip(ours[HALF], ours[RECOMP], strict=True)]
    yield compared(
        "ideal fraction of 1F1B and Chronos-Pipe by the paper's formula, T_c = 0.104 T_unit",
        paper=[f"{fraction:.4f}" for fraction in printed.values()],
        ours=[ours[method][0] for method in printed],
    )
    yield compared("points that Chronos-Pipe is below 1F1B, as derived", paper=("5",), ours=[below])
    yield compared(
        "points that Chronos-Pipe is below 1F1B, as measured",
        paper=("6",),
        ours=[below],
        because="the paper lays 5 of them on messages too, and does not say what the sixth is",
    )
    yield compared(
        "points that Chronos-Recomp is below 1F1B + R = 50%, where the receiver waits",
        paper=("at most 3",),
        ours=[lost[1]],
    )
    yield compared(
        "the same with blocking messages",
        paper=("at most 3",),
        ours=[lost[0]],
        because="messages that block both ends never overlap recomputation, which section 4.2 says they do",
    )
    table = Table(
        title="Figure 13: ideal computation fraction at PP4, m = 64, T_c = 0.104 T_unit",
        columns=("method", "paper's formula", "ours: blocking", "receiver waits", "asynchronous"),
        rows=tuple((method.name, printed.get(method), *fractions) for method, fractions in ours.items()),
        basis="modelled",
        note="Blocking: adjacent messages take both ends' compute lanes, those between chunks do not. Without"
        " recomputation they give the paper's formula. It measures a drop of 6 points from 1F1B to Chronos-Pipe and"
        f" derives 5, and at most 3 with recomputation. Ours is then {lost[0]:.1f} points with blocking messages,"
        f" {lost[1]:.1f} where the receiver waits and {lost[2]:.1f} with asynchronous ones.",
    )
    yield table
    yield table.bars("ideal computation fraction", table.columns[2:])


def _printed_fraction(messages: int) -> float:
    """6 m over the paper's total time (section 4.1), p = 4, m = 64; it prints none with recomputation and messages."""
    return round(float(6 * 64 / (6 * (64 + 4 - 1) + messages * MESSAGE)), 4)


def figure_14() -> Iterator[Exhibit]:
    """Scaling of Chronos-Offload."""
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
    ours = [number(hidden) for _, _, hidden, _ in rows]
    yield compared(
        "host step hidden at PP4 (fitted), with twice the stages, with twice the length",
        paper=("45.45", "94.55", "100"),
        ours=ours[:3],
        unit="%",
        because="the first is fitted and the others double; the paper's idle time and attention grow by more",
    )
    table = Table(
        title="Figure 14: share of the gradient offload and host step that fits into the cool-down's idle time",
        columns=("setting", "paper", "ours", "ours: longer step"),
        rows=tuple(rows),
        basis="fitted",
        note="Fitted: the time of the offloaded chunk's gradients and step, from the first row. Longer sequences count"
        " linearly; attention makes them longer than that. In our program the host also works beside the last"
        " backwards, so that even PP4 loses less than the idle time suggests.",
    )
    yield table
    yield Bars(
        title=table.title,
        groups=[name for name, *_ in rows],
        series={"ours": ours},
        paper={"ours": [None if published is None else number(published) for _, published, *_ in rows]},
        unit="percent",
    )


def figure_15() -> Iterator[Exhibit]:
    """Recomputation of more chunks."""
    rows = []
    for v in (2, 3, 4):
        for n in range(v + 1):
            made = periodic("", devices=4, micro_batches=24, chunks=v, recompute=dict.fromkeys(range(n), 1))
            stored = Fraction(_stored_blocks(made.orders[0], 4 * n), 4 * v)
            rows.append((v, percent(n / v), percent(float(stored)), percent(1 - n / v)))
    kept = {(v, number(share)): number(chronos) for v, share, chronos, _ in rows}
    shares = sorted({share for _, share in kept})
    yield compared(
        "4 chunks, 25% recomputed: activations in percent of m_a (printed as `reduced by up to`)",
        paper=("43.75",),
        ours=[kept[4, 25]],
        unit="%",
    )
    never = all(number(chronos) <= number(plain) for *_, chronos, plain in rows)
    yield holds("Chronos-Recomp never keeps more than 1F1B with the same recomputation", never)
    table = Table(
        title="Figure 15: activations kept at PP4, in % of m_a",
        columns=("chunks", "recomputed", "Chronos-Recomp", "1F1B"),
        rows=tuple(rows),
        basis="exact",
        note="Without the memory of the block that is being recomputed, as in the paper. With 4 chunks and 25%"
        " recomputed, 43.75% remain: the paper says that it is reduced 'by up to 43.75%'.",
    )
    yield table
    yield Lines(
        title=table.title,
        across="layers that recompute, percent",
        x=shares,
        series={
            **{f"{v} chunks": [kept.get((v, share)) for share in shares] for v in (2, 3, 4)},
            "1F1B": [100 - share for share in shares],
        },
        unit="percent of m_a",
    )


def _stored_blocks(order: Sequence[Op], first: int) -> int:
    """Peak of a device in blocks of the stages from `first` on."""
    alive = most = 0
    for op in order:
        if op.stage >= first:
            alive += {Kind.F: 1, Kind.B: -1}.get(op.kind, 0)
            most = max(most, alive)
    return most


HOST_TIMES = (8, 16, 24, 32, 48)
"""Times of the host for all of a device's parameters, in T_unit."""


def figure_16() -> Iterator[Exhibit]:
    """Offload with more chunks."""
    idle = {
        v: step_window(Method("", "chronos", v).run(4, 24), device=0, chunk=v - 1) / Fraction(4, v) for v in (2, 3, 4)
    }
    kept = {v: [percent(1 - 2 / 3 * hosted_chunks(v, time) / v) for time in HOST_TIMES] for v in idle}
    yield compared(
        "idle backwards in the cool-down with 3 and 4 chunks, of those with 2",
        paper=("1.5", "1.5"),
        ours=[float(idle[v] / 2) for v in (3, 4)],
        because="ours with 4 chunks is the order that holds least activations; orders that hold more have 1.5",
    )
    two, three, four = (number(shares[0]) for shares in kept.values())
    diminish = four < two and four - three > three - two
    yield stated(
        "more chunks let more states go where the host is fast, and fewer where it is slow",
        paper="diminishing returns",
        ours="diminishing returns" if diminish else "returns that do not diminish",
    )
    published = {2: 1.0, 3: 1.5, 4: 1.5}
    yield Table(
        title="Figure 16: idle backwards of one chunk in the cool-down at PP4, and states kept by the time of the host",
        columns=("chunks", "paper: of v = 2", "ours", "backwards", *(f"host {time}" for time in HOST_TIMES)),
        rows=tuple((v, published[v], float(idle[v] / 2), int(idle[v]), *kept[v]) for v in idle),
        basis="modelled",
        note="With 4 chunks, the order that holds least activations has six idle backwards; orders that hold more have"
        " three, as the paper says. States kept: as many of the deepest chunks step on the host as lose no time, where"
        " gradients and step of a whole device take the host so many T_unit (a forward and backward take 6).",
    )
    yield Lines(
        title="Figure 16: model states kept at PP4, as many deep chunks on the host as lose no time",
        across="time of the host for a device's parameters, T_unit",
        x=HOST_TIMES,
        series={f"{v} chunks": list(map(number, shares)) for v, shares in kept.items()},
        unit="percent",
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
