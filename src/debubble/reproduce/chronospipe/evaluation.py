"""ChronosPipe's section 6: memory and throughput beside other methods, Figures 9 to 12."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from debubble.ir.stage_costs import CommunicationModel
from debubble.reproduce.chronospipe import planned, tables
from debubble.reproduce.chronospipe.memory_model import ALL, CHRONOS, FULL, HALF, INTERLEAVED, PLAIN, RECOMP, Method
from debubble.reproduce.claims import Claim, compared, stated
from debubble.reproduce.drawings import Bars, Drawing, Lines
from debubble.reproduce.registry import Exhibit, number

BETWEEN = "how messages and compute overlap on the paper's cluster lies between our models"


def _throughput(
    statement: str, method: Method, reference: Method, p: int, m: int, paper: str, *, blocking: bool = False
) -> Claim:
    """A throughput in percent of another's, with the messages that the text describes; others beside it."""
    shares = {k: 100 * v for k, v in tables.throughputs(method, reference, p, m).items()}
    chosen: CommunicationModel = "blocking" if blocking else "receiver"
    others = ", ".join(f"{value:.1f}% {tables.MESSAGES[model]}" for model, value in shares.items())
    return compared(
        f"{statement}; ours {tables.MESSAGES[chosen]}",
        paper=(paper,),
        ours=[shares[chosen]],
        unit="%",
        because=f"{BETWEEN}: {others}",
    )


def figure_9a() -> Iterator[Exhibit]:
    """Memory and throughput of 48 layers."""
    table = tables.figure_9a()
    ours = {row[0]: row for row in table.cells}
    over = [name for name, row in ours.items() if row[2] + row[3] > tables.LIMIT]
    yield compared(
        "GB of activations of Chronos-Pipe (fitted), + Recomp, 1F1B + R = 50%",
        paper=("17.23", "6.63", "10.6"),
        ours=[ours[method.name][2] for method in (CHRONOS, RECOMP, HALF)],
    )
    yield compared(
        "ALL's memory in percent of 1F1B + R = 50%'s",
        paper=("64.6",),
        ours=[100 * ours[ALL.name][5]],
        unit="%",
        because="the activations of a layer are fitted to 17.23 GB; embedding and head are left out",
    )
    yield stated("methods out of memory in 32 GB", paper=f"{PLAIN.name}, {INTERLEAVED.name}", ours=", ".join(over))
    yield _throughput("throughput of ALL in percent of 1F1B + R = 50%'s", RECOMP, HALF, 8, 64, "97.58")
    yield table
    yield tables.message_models()
    yield _memory_bars("Figure 9a: GB per device, 48 layers, PP8 TP8", table.cells)
    yield _throughput_bars()


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


def figure_9b() -> Iterator[Exhibit]:
    """The largest models."""
    table = tables.figure_9b()
    yield compared(
        "layers in 32 GB: " + ", ".join(str(row[0]) for row in table.rows),
        paper=[str(row[1]) for row in table.rows],
        ours=[row[2] for row in table.cells],
    )
    yield compared(
        "ALL's over 1F1B's, and over 1F1B + R = 50%'s",
        paper=("2.4", "1.5"),
        ours=[tables.largest_model(ALL) / tables.largest_model(each) for each in (PLAIN, HALF)],
    )
    yield table
    yield Bars(
        title=table.title,
        groups=[str(row[0]) for row in table.rows],
        series={"layers": [row[2] for row in table.cells]},
        paper={"layers": [row[1] for row in table.cells]},
        unit="layers",
    )


def figure_10() -> Iterator[Exhibit]:
    """Other ways to recompute."""
    fitted, ours = tables.figure_10(), planned.figure_10()
    savings = [row[2] for row in fitted.cells]
    speeds = {row[:2]: row[4] for row in ours.cells}
    yield compared(
        "saving over 1F1B of Megatron-Kwai, Chronos-Recomp and ALL", paper=("1.27", "1.72", "2.22"), ours=savings
    )
    yield compared(
        "speed of Chronos-Recomp over 1F1B + R = 100%, without messages",
        paper=("1.17",),
        ours=[fitted.cells[1][4]],
        because="no message takes time here; with blocking ones it is less",
    )
    yield compared(
        "speed of AdaPipe over 1F1B + R = 100% in the memory of its 1.76, by our planner",
        paper=("1.26",),
        ours=[speeds["adapipe", 1.76]],
        because="costs are our model's, on other hardware, and the planner chooses among all operators",
    )
    yield compared(
        "speed of ChronosPipe in the memory of its 1.72, by our planner",
        paper=("1.17",),
        ours=[speeds["chronos", 1.72]],
        because="our planner recomputes cheap operators first, offloads activations too, and splits backwards",
    )
    yield compared(
        "throughput that Megatron-Kwai loses against 1F1B in the memory of its 1.27: negligible, our planner",
        paper=("at most 2",),
        ours=[100 * (1 - speeds["megatron-kwai", 1.27] / speeds["dapple", 1.0])],
        unit="%",
    )
    yield fitted
    yield ours
    yield Bars(
        title="Figure 10: speed over 1F1B + R = 100% in the memory of each saving, planned",
        groups=[f"{row[0]}, saving {row[1]}" for row in ours.rows],
        series={"ours": [row[4] for row in ours.cells]},
        paper={"ours": [row[3] for row in ours.cells]},
        unit="speed",
    )


def figure_11() -> Iterator[Exhibit]:
    """Sequence lengths at PP4."""
    table, memory = tables.figure_11(), tables.figure_11_memory()
    held = {row[0]: row[1:] for row in memory.cells}
    long = held["interleaved 1F1B + R = 50%"][tables.LENGTHS.index(8)]
    yield compared(
        "activations saved by Chronos-Pipe and by Chronos-Recomp, against 1F1B and 1F1B + R = 50%",
        paper=("12.5", "25"),
        ours=[number(row[2]) for row in table.cells[:2]],
        unit="%",
    )
    yield stated(
        "interleaved 1F1B + R = 50% at 8K",
        paper="out of memory",
        ours="out of memory" if "OOM" in long else f"{long} GB of {tables.LIMIT}",
        because="ours counts neither the embedding nor the layer that is being recomputed, workspace and fragments",
    )
    yield _throughput(
        "throughput of Chronos-Pipe in percent of 1F1B's: 6% to 9% lower",
        CHRONOS,
        PLAIN,
        4,
        32,
        "91 to 94",
        blocking=True,
    )
    yield _throughput(
        "throughput of Chronos-Recomp in percent of 1F1B + R = 50%'s: comparable", RECOMP, HALF, 4, 32, "97 to 103"
    )
    yield table
    yield memory
    yield Lines(
        title=memory.title,
        across="thousands of tokens",
        x=tables.LENGTHS,
        series={name: [number(cell) for cell in cells] for name, cells in held.items()},
        unit="GB",
        limit=tables.LIMIT,
    )


def figure_12() -> Iterator[Exhibit]:
    """Other dense models."""
    table, ours = tables.figure_12(), planned.figure_12()
    speeds = {row[:2]: row[4] for row in ours.cells}
    fit = [row[0] for row in table.cells if row[2] <= tables.LIMIT]
    methods = (HALF, FULL, RECOMP, ALL)
    yield compared(
        "saving of Chronos-Recomp over 1F1B + R = 50%: Qwen2.5-32B, PaLM-62B, OPT-66B",
        paper=["1.21 to 1.26"] * 3,
        ours=[row[4] for row in table.cells],
        because="nothing is fitted; layers only",
    )
    yield compared(
        "saving of ALL, the same",
        paper=["1.56 to 1.58"] * 3,
        ours=[row[5] for row in table.cells],
        because="nothing is fitted; layers only",
    )
    yield stated(
        "models that fit into 32 GB with Chronos-Recomp", paper="Qwen2.5-32B, PaLM-62B, OPT-66B", ours=", ".join(fit)
    )
    yield _throughput("throughput of Chronos-Recomp in percent of 1F1B + R = 100%'s", RECOMP, FULL, 8, 64, "115")
    yield _throughput(
        "throughput of Chronos-Recomp in percent of 1F1B + R = 50%'s: similar", RECOMP, HALF, 8, 64, "97 to 103"
    )
    yield compared(
        "speed of ChronosPipe over 1F1B + R = 100% in 32 GB, by our planner: the same models",
        paper=["1.15"] * 3,
        ours=[speeds[shape.name, "chronos"] for shape in tables.MODELS_12],
        because="our planner recomputes what the 32 GB ask for, and no more",
    )
    yield compared(
        "saving of ALL over 1F1B + R = 100%",
        paper=["1.04 to 1.10"] * 3,
        ours=[tables.total_of(shape, FULL) / tables.total_of(shape, ALL) for shape in tables.MODELS_12],
        because="R = 100% keeps nothing in our count, where the paper counts checkpoints, of what it does not say",
    )
    yield table
    yield ours
    yield Bars(
        title="Figure 12: GB per device, layers only",
        groups=[shape.name for shape in tables.MODELS_12],
        series={each.name: [tables.total_of(shape, each) for shape in tables.MODELS_12] for each in methods},
        unit="GB",
        limit=tables.LIMIT,
    )
    yield Bars(
        title="Figure 12: speed over 1F1B + R = 100% in 32 GB, planned",
        groups=[shape.name for shape in tables.MODELS_12],
        series={
            planner: [speeds[shape.name, planner] for shape in tables.MODELS_12] for planner in planned.PLANNERS_12
        },
        paper={"chronos": [1.15] * 3},
        unit="speed",
    )
