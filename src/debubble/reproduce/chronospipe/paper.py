"""ChronosPipe's figures and sections in the paper's order, with what each claims."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from debubble.ir.stage_costs import CommunicationModel
from debubble.reproduce.chronospipe import schedules, tables, timelines
from debubble.reproduce.chronospipe.memory_model import (
    ALL,
    CHRONOS,
    FULL,
    HALF,
    INTERLEAVED,
    PLAIN,
    RECOMP,
    Method,
)
from debubble.reproduce.claims import Claim, compared, stated
from debubble.reproduce.drawings import Bars, Drawing, Lines
from debubble.reproduce.registry import Cell, Entry, Exhibit, Paper, Table, papers

BETWEEN = "how messages and compute overlap on the paper's cluster lies between our models"


def _rows(table: Table) -> Sequence[Any]:
    """The rows, whose cells the reader knows."""
    return table.rows


def _share(cell: Cell) -> float:
    """The number of a cell such as `87.5%`, or `38.5 OOM`."""
    match = re.match(r"-?[\d.]+", str(cell))
    assert match, cell
    return float(match.group())


def _throughput(
    statement: str, method: Method, reference: Method, *, p: int, m: int, paper: str, blocking: bool = False
) -> Claim:
    """A throughput in percent of another's, with the messages that the text describes; others beside it."""
    shares = {k: 100 * v for k, v in tables.throughputs(method, reference, devices=p, micro_batches=m).items()}
    chosen: CommunicationModel = "blocking" if blocking else "receiver"
    others = ", ".join(f"{value:.1f}% {tables.MESSAGES[model]}" for model, value in shares.items())
    return compared(
        f"{statement}; ours {tables.MESSAGES[chosen]}",
        paper=(paper,),
        ours=[shares[chosen]],
        unit="%",
        because=f"{BETWEEN}: {others}",
    )


def figure_1() -> Exhibit:
    """Memory under 1F1B, and what it leaves lying."""
    table = tables.figure_1()
    ends = PLAIN.run(4, 16).peak_memory
    return Exhibit(
        claims=(
            compared(
                "(a) GB of activations of 70B at 4K and 16K, and of 140B at 4K",
                paper=("35.20", "140.80", "70.40"),
                ours=[row[2] for row in _rows(table)],
                because="ours are counted tensor by tensor; the paper's have one more of width h / t per layer",
            ),
            compared(
                "(a) GB of model states, the same",
                paper=("19.69", "19.69", "39.38"),
                ours=[row[4] for row in _rows(table)],
            ),
            compared(
                "(b) peak of the first and of the last stage, in shares of m_a, p = 4",
                paper=("1.00", "0.25"),
                ours=[float(ends[0]), float(ends[-1])],
            ),
        ),
        tables=(table,),
        drawings=(
            Bars(
                title="Figure 1a: GB per device under 1F1B",
                groups=[str(row[0]) for row in table.rows],
                series={
                    "activations": [row[2] for row in _rows(table)],
                    "model states": [row[4] for row in _rows(table)],
                },
                unit="GB",
                stacked=True,
                limit=tables.LIMIT,
            ),
            timelines.one_f_one_b(),
        ),
    )


def figure_2() -> Exhibit:
    """Interleaved 1F1B, and orders in groups."""
    peaks = [INTERLEAVED.activations(p) for p in (4, 8, 16)]
    return Exhibit(
        claims=(
            compared(
                "peak of interleaved 1F1B over m_a at p = 4, 8, 16: 1 + (p - 1) / (p v)",
                paper=("1.375", "1.438", "1.469"),
                ours=peaks,
            ),
        ),
        drawings=(timelines.others(),),
    )


def figure_5() -> Exhibit:
    """Chronos-Pipe: memory, time and messages."""
    table = schedules.peaks()
    peaks = {row[0]: _share(row[3]) for row in _rows(table)}
    totals = {row[0]: (row[1], row[2]) for row in _rows(table)}
    blocking = {method: method.run(4, 128, message=0.05, model="blocking").makespan for method in (PLAIN, CHRONOS)}
    overhead = [100 * (1 - 6 * 128 / float(time)) for time in blocking.values()]
    return Exhibit(
        claims=(
            compared(
                "time 6(m + p - 1) T_unit at m = 64, p = 4, 8, 12, 16",
                paper=[str(paper) for paper, _ in totals.values()],
                ours=[ours for _, ours in totals.values()],
            ),
            compared(
                "peak in percent of m_a at p = 4, 8, 12, 16: equations (1) and (2), 75% for large p",
                paper=("87.50", "81.25", "79.17", "78.12"),
                ours=list(peaks.values()),
                unit="%",
            ),
            compared(
                "peak at p = 64",
                paper=("75",),
                ours=[100 * CHRONOS.activations(64)],
                unit="%",
                because="75% is the limit for large p",
            ),
            compared(
                "(b) bubbles with blocking messages, 1F1B and Chronos-Pipe, T_c = 0.05 T_unit, m = 128, p = 4",
                paper=("5.37", "8.27"),
                ours=overhead,
                unit="%",
                because="8.2766% is printed truncated, and the schedule needs one message more than the formula",
            ),
        ),
        tables=(table,),
        drawings=(timelines.pipe(), timelines.messages()),
    )


def figure_6() -> Exhibit:
    """Chronos-Recomp."""
    table, delays = schedules.peaks(), schedules.delays()
    return Exhibit(
        claims=(
            compared(
                "time 6 p + 7 (m - 1) T_unit at m = 64, p = 4, 8, 12, 16",
                paper=[str(row[4]) for row in _rows(table)],
                ours=[row[5] for row in _rows(table)],
                because="the paper's is an upper bound; ours is shorter",
            ),
            compared(
                "activations kept at p = 8, in percent of m_a, without the block that is being recomputed",
                paper=("25",),
                ours=[100 * (RECOMP.activations(8) - 1 / 16)],
                unit="%",
            ),
            compared(
                "saved over what 1F1B + R = 50% saves",
                paper=("1.5",),
                ours=[(1 - (RECOMP.activations(8) - 1 / 16)) / (1 - HALF.activations(8))],
            ),
            compared(
                "equation (8): rounds k that chunk 2 is delayed at p = 8, 10, 12, 16, 24, 27, 36, 40 (text of the"
                " appendix: 1 for 8 <= p <= 40)",
                paper=["1"] * 8,
                ours=[row[2] for row in _rows(delays) if row[0] in (8, 10, 12, 16, 24, 27, 36, 40)],
                because="the text contradicts its own equation (8), which ours solves",
            ),
        ),
        tables=(delays,),
        drawings=(timelines.recomp(),),
    )


def figure_7() -> Exhibit:
    """The ZeRO-2 variant."""
    shares = [float(Method("", "chronos-zero2", 2).run(p, 32).peak_memory[0]) for p in (4, 8, 16)]
    return Exhibit(
        claims=(
            compared(
                "peak over m_a at p = 4, 8, 16 with groups of two, against Chronos-Pipe's: minimal impact",
                paper=[f"{CHRONOS.activations(p):.2f}" for p in (4, 8, 16)],
                ours=shares,
                because="the figure is not in the text; our reading, which alternates forwards and backwards, takes one"
                " block more on short pipelines",
            ),
        ),
        drawings=(timelines.zero2(),),
    )


def figure_8() -> Exhibit:
    """Chronos-Offload."""
    table = schedules.windows()
    return Exhibit(
        claims=(
            compared(
                "equation (4): idle backwards of one chunk in the cool-down, p = 4, 8, 12, 16",
                paper=[str(row[1]) for row in _rows(table)],
                ours=[row[2] for row in _rows(table)],
            ),
            compared(
                "equation (6): idle forwards of one chunk in the warm-up, p = 4, 8, 12, 16",
                paper=[str(row[3]) for row in _rows(table)],
                ours=[row[4] for row in _rows(table)],
            ),
            compared(
                "share of the model states that gradients and weights are",
                paper=("33",),
                ours=[100 * (1 - (1 - ALL.states) * 2)],
                unit="%",
            ),
        ),
        tables=(table,),
        drawings=(timelines.offload(),),
    )


def figure_9a() -> Exhibit:
    """Memory and throughput of 48 layers."""
    table = tables.figure_9a()
    ours = {row[0]: row for row in _rows(table)}
    over = [name for name, row in ours.items() if row[2] + row[3] > tables.LIMIT]
    return Exhibit(
        claims=(
            compared(
                "GB of activations of Chronos-Pipe (fitted), + Recomp, 1F1B + R = 50%",
                paper=("17.23", "6.63", "10.6"),
                ours=[ours[method.name][2] for method in (CHRONOS, RECOMP, HALF)],
            ),
            compared(
                "ALL's memory in percent of 1F1B + R = 50%'s",
                paper=("64.6",),
                ours=[100 * ours[ALL.name][5]],
                unit="%",
                because="the activations of a layer are fitted to 17.23 GB; embedding and head are left out",
            ),
            stated("methods out of memory in 32 GB", paper=f"{PLAIN.name}, {INTERLEAVED.name}", ours=", ".join(over)),
            _throughput("throughput of ALL in percent of 1F1B + R = 50%'s", RECOMP, HALF, p=8, m=64, paper="97.58"),
        ),
        tables=(table, tables.message_models()),
        drawings=(_memory_bars("Figure 9a: GB per device, 48 layers, PP8 TP8", _rows(table)), _throughput_bars()),
    )


def _memory_bars(title: str, rows: Sequence[Any]) -> Bars:
    return Bars(
        title=title,
        groups=[row[0] for row in rows],
        series={"activations": [row[2] for row in rows], "model states": [row[3] for row in rows]},
        unit="GB",
        stacked=True,
        limit=tables.LIMIT,
    )


def _throughput_bars() -> Drawing:
    table = tables.message_models()
    return Bars(
        title="Throughputs of Figures 9a, 11, 12 and 13 in percent of the reference, by model of messages",
        groups=[f"{row[0]}: {row[1]} of {row[2]}, {str(row[3]).split(',')[0]}" for row in table.rows],
        series={name: [float(row[5 + at] or 0) for row in table.rows] for at, name in enumerate(table.columns[5:])},
        unit="percent",
        limit=100,
    )


def figure_9b() -> Exhibit:
    """The largest models."""
    table = tables.figure_9b()
    return Exhibit(
        claims=(
            compared(
                "layers in 32 GB: " + ", ".join(str(row[0]) for row in table.rows),
                paper=[str(row[1]) for row in table.rows],
                ours=[row[2] for row in _rows(table)],
            ),
            compared(
                "ALL's over 1F1B's, and over 1F1B + R = 50%'s",
                paper=("2.4", "1.5"),
                ours=[tables.largest_model(ALL) / tables.largest_model(each) for each in (PLAIN, HALF)],
            ),
        ),
        tables=(table,),
        drawings=(
            Bars(
                title=table.title,
                groups=[str(row[0]) for row in table.rows],
                series={"layers": [row[2] for row in _rows(table)]},
                paper={"layers": [row[1] for row in _rows(table)]},
                unit="layers",
            ),
        ),
    )


def figure_10() -> Exhibit:
    """Other ways to recompute."""
    fitted, planned = tables.figure_10(), tables.figure_10_planned()
    savings = [row[2] for row in _rows(fitted)]
    speeds = {row[:2]: row[4] for row in _rows(planned)}
    return Exhibit(
        claims=(
            compared(
                "saving over 1F1B of Megatron-Kwai, Chronos-Recomp and ALL",
                paper=("1.27", "1.72", "2.22"),
                ours=savings,
            ),
            compared(
                "speed of Chronos-Recomp over 1F1B + R = 100%, without messages",
                paper=("1.17",),
                ours=[_rows(fitted)[1][4]],
                because="no message takes time here; with blocking ones it is less",
            ),
            compared(
                "speed of AdaPipe over 1F1B + R = 100% in the memory of its 1.76, by our planner",
                paper=("1.26",),
                ours=[speeds["adapipe", 1.76]],
                because="costs are our model's, on other hardware, and the planner chooses among all operators",
            ),
            compared(
                "speed of ChronosPipe in the memory of its 1.72, by our planner",
                paper=("1.17",),
                ours=[speeds["chronos", 1.72]],
                because="our planner recomputes cheap operators first, and offloads activations too",
            ),
            compared(
                "throughput that Megatron-Kwai loses against 1F1B in the memory of its 1.27: negligible, our planner",
                paper=("at most 2",),
                ours=[100 * (1 - speeds["megatron-kwai", 1.27] / speeds["dapple", 1.0])],
                unit="%",
            ),
        ),
        tables=(fitted, planned),
        drawings=(
            Bars(
                title="Figure 10: speed over 1F1B + R = 100% in the memory of each saving, planned",
                groups=[f"{row[0]}, saving {row[1]}" for row in planned.rows],
                series={"ours": [row[4] for row in _rows(planned)]},
                paper={"ours": [row[3] for row in _rows(planned)]},
                unit="speed",
            ),
        ),
    )


def figure_11() -> Exhibit:
    """Sequence lengths at PP4."""
    table, memory = tables.figure_11(), tables.figure_11_memory()
    held = {row[0]: row[1:] for row in _rows(memory)}
    long = held["interleaved 1F1B + R = 50%"][tables.LENGTHS.index(8)]
    return Exhibit(
        claims=(
            compared(
                "activations saved by Chronos-Pipe and by Chronos-Recomp, against 1F1B and 1F1B + R = 50%",
                paper=("12.5", "25"),
                ours=[_share(row[2]) for row in _rows(table)[:2]],
                unit="%",
            ),
            stated(
                "interleaved 1F1B + R = 50% at 8K",
                paper="out of memory",
                ours="out of memory" if "OOM" in long else f"{long} GB of {tables.LIMIT}",
                because="ours counts neither the embedding nor the layer that is being recomputed, workspace and"
                " fragments",
            ),
            _throughput(
                "throughput of Chronos-Pipe in percent of 1F1B's: 6% to 9% lower", CHRONOS, PLAIN, p=4, m=32,
                paper="91 to 94", blocking=True,
            ),
            _throughput(
                "throughput of Chronos-Recomp in percent of 1F1B + R = 50%'s: comparable", RECOMP, HALF, p=4, m=32,
                paper="97 to 103",
            ),
        ),
        tables=(table, memory),
        drawings=(
            Lines(
                title=memory.title,
                across="thousands of tokens",
                x=tables.LENGTHS,
                series={name: [_share(cell) for cell in cells] for name, cells in held.items()},
                unit="GB",
                limit=tables.LIMIT,
            ),
        ),
    )  # fmt: skip


def figure_12() -> Exhibit:
    """Other dense models."""
    table = tables.figure_12()
    fit = [row[0] for row in _rows(table) if row[2] <= tables.LIMIT]
    methods = (HALF, FULL, RECOMP, ALL)
    return Exhibit(
        claims=(
            compared(
                "saving of Chronos-Recomp over 1F1B + R = 50%: Qwen2.5-32B, PaLM-62B, OPT-66B",
                paper=["1.21 to 1.26"] * 3,
                ours=[row[4] for row in _rows(table)],
                because="nothing is fitted; layers only",
            ),
            compared(
                "saving of ALL, the same",
                paper=["1.56 to 1.58"] * 3,
                ours=[row[5] for row in _rows(table)],
                because="nothing is fitted; layers only",
            ),
            stated(
                "models that fit into 32 GB with Chronos-Recomp",
                paper="Qwen2.5-32B, PaLM-62B, OPT-66B",
                ours=", ".join(fit),
            ),
            _throughput(
                "throughput of Chronos-Recomp in percent of 1F1B + R = 100%'s", RECOMP, FULL, p=8, m=64, paper="115"
            ),
            _throughput(
                "throughput of Chronos-Recomp in percent of 1F1B + R = 50%'s: similar", RECOMP, HALF, p=8, m=64,
                paper="97 to 103",
            ),
            compared(
                "saving of ALL over 1F1B + R = 100%",
                paper=["1.04 to 1.10"] * 3,
                ours=[
                    tables.total_of(shape, FULL) / tables.total_of(shape, ALL) for shape in tables.MODELS_12
                ],
                because="R = 100% keeps nothing in our count, where the paper counts checkpoints, of what it does not"
                " say",
            ),
        ),
        tables=(table,),
        drawings=(
            Bars(
                title="Figure 12: GB per device, layers only",
                groups=[shape.name for shape in tables.MODELS_12],
                series={
                    each.name: [tables.total_of(shape, each) for shape in tables.MODELS_12] for each in methods
                },
                unit="GB",
                limit=tables.LIMIT,
            ),
        ),
    )  # fmt: skip


def figure_13() -> Exhibit:
    """Messages."""
    table = schedules.figure_13()
    rows = {row[0]: row[1:] for row in _rows(table)}
    plain, chronos, half, recomp = (rows[each.name] for each in (PLAIN, CHRONOS, HALF, RECOMP))
    return Exhibit(
        claims=(
            compared(
                "ideal fraction of 1F1B and Chronos-Pipe by the paper's formula, T_c = 0.104 T_unit",
                paper=[f"{plain[0]:.4f}", f"{chronos[0]:.4f}"],
                ours=[plain[1], chronos[1]],
            ),
            compared(
                "points that Chronos-Pipe is below 1F1B, as derived",
                paper=("5",),
                ours=[100 * (plain[1] - chronos[1])],
            ),
            compared(
                "points that Chronos-Pipe is below 1F1B, as measured",
                paper=("6",),
                ours=[100 * (plain[1] - chronos[1])],
                because="the paper lays 5 of them on messages too, and does not say what the sixth is",
            ),
            compared(
                "points that Chronos-Recomp is below 1F1B + R = 50%, where the receiver waits",
                paper=("at most 3",),
                ours=[100 * (half[2] - recomp[2])],
            ),
            compared(
                "the same with blocking messages",
                paper=("at most 3",),
                ours=[100 * (half[1] - recomp[1])],
                because="messages that block both ends never overlap recomputation, which section 4.2 says they do",
            ),
        ),
        tables=(table,),
        drawings=(
            Bars(
                title=table.title,
                groups=list(rows),
                series={name: [row[1 + at] for row in rows.values()] for at, name in enumerate(table.columns[2:])},
                unit="ideal computation fraction",
            ),
        ),
    )


def figure_14() -> Exhibit:
    """Scaling of Chronos-Offload."""
    table = schedules.figure_14()
    ours = [_share(row[2]) for row in _rows(table)]
    return Exhibit(
        claims=(
            compared(
                "host step hidden at PP4 (fitted), with twice the stages, with twice the length",
                paper=("45.45", "94.55", "100"),
                ours=ours[:3],
                unit="%",
                because="the first is fitted and the others double; the paper's idle time and attention grow by more",
            ),
        ),
        tables=(table,),
        drawings=(
            Bars(
                title=table.title,
                groups=[str(row[0]) for row in table.rows],
                series={"ours": ours},
                paper={"ours": [None if row[1] is None else _share(row[1]) for row in table.rows]},
                unit="percent",
            ),
        ),
    )


def figure_15() -> Exhibit:
    """Recomputation of more chunks."""
    table = schedules.figure_15()
    kept = {(row[0], _share(row[1])): _share(row[2]) for row in _rows(table)}
    shares = sorted({share for _, share in kept})
    never = all(_share(row[2]) <= _share(row[3]) for row in _rows(table))
    return Exhibit(
        claims=(
            compared(
                "4 chunks, 25% recomputed: activations in percent of m_a (printed as `reduced by up to`)",
                paper=("43.75",),
                ours=[kept[4, 25]],
                unit="%",
            ),
            stated(
                "Chronos-Recomp never keeps more than 1F1B with the same recomputation",
                paper="yes",
                ours="yes" if never else "no",
            ),
        ),
        tables=(table,),
        drawings=(
            Lines(
                title=table.title,
                across="layers that recompute, percent",
                x=shares,
                series={
                    **{f"{v} chunks": [kept.get((v, share)) for share in shares] for v in (2, 3, 4)},
                    "1F1B": [100 - share for share in shares],
                },
                unit="percent of m_a",
            ),
        ),
    )


def figure_16() -> Exhibit:
    """Offload with more chunks."""
    table = schedules.figure_16()
    kept = {f"{row[0]} chunks": [_share(cell) for cell in row[4:]] for row in _rows(table)}
    return Exhibit(
        claims=(
            compared(
                "idle backwards in the cool-down with 3 and 4 chunks, of those with 2",
                paper=("1.5", "1.5"),
                ours=[row[2] for row in _rows(table)[1:]],
                because="ours with 4 chunks is the order that holds least activations; orders that hold more have 1.5",
            ),
            stated(
                "more chunks let more states go where the host is fast, and fewer where it is slow",
                paper="diminishing returns",
                ours="diminishing returns"
                if kept["4 chunks"][0] < kept["2 chunks"][0]
                and kept["4 chunks"][0] - kept["3 chunks"][0] > kept["3 chunks"][0] - kept["2 chunks"][0]
                else "returns that do not diminish",
            ),
        ),
        tables=(table,),
        drawings=(
            Lines(
                title="Figure 16: model states kept at PP4, as many deep chunks on the host as lose no time",
                across="time of the host for a device's parameters, T_unit",
                x=schedules.HOST_TIMES,
                series=kept,
                unit="percent",
            ),
        ),
    )


papers.add(
    "chronospipe",
    Paper(
        name="chronospipe",
        title="ChronosPipe: Temporal Locality in Pipeline Parallelism (arXiv)",
        entries=(
            Entry("Figure 1", "memory under 1F1B, and its first and last stage", figure_1),
            Entry("Figure 2", "interleaved 1F1B and orders in groups", figure_2),
            Entry.diagram(
                "Figure 3",
                "forward and backward pass",
                "what is used soon and what late",
                "docs/chronospipe.md says it",
            ),
            Entry.diagram(
                "Figure 4",
                "the parts of ChronosPipe",
                "scheduling, recomputation and offload",
                "docs/chronospipe.md lists them",
            ),
            Entry("Figure 5", "Chronos-Pipe, and its messages", figure_5),
            Entry("Figure 6", "Chronos-Recomp, equations (3) and (8)", figure_6),
            Entry("Figure 7", "the ZeRO-2 variant", figure_7),
            Entry("Figure 8", "Chronos-Offload, equations (4) to (7)", figure_8),
            Entry("Figure 9a", "memory and throughput of 48 layers", figure_9a),
            Entry("Figure 9b", "the largest models", figure_9b),
            Entry("Figure 10", "other ways to recompute", figure_10, slow=True),
            Entry("Figure 11", "sequence lengths at PP4", figure_11),
            Entry("Figure 12", "other dense models", figure_12),
            Entry("Figure 13", "the cost of messages", figure_13),
            Entry("Figure 14", "scaling of Chronos-Offload", figure_14),
            Entry("Figure 15", "recomputation of more chunks", figure_15),
            Entry("Figure 16", "offload with more chunks", figure_16),
        ),
    ),
)
