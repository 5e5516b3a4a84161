"""ChronosPipe, section 6, Figures 9 to 12: memory and throughput compared with other methods."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.ir.stage_costs import CommunicationModel
from debubble.papers.chronospipe.figures import planner_runs
from debubble.papers.chronospipe.figures.memory_model import (
    ALL,
    CHRONOS,
    FULL,
    GB,
    HALF,
    INTERLEAVED,
    INTERLEAVED_HALF,
    INTERLEAVED_RECOMPUTED,
    LAYER,
    LAYER_STATES,
    LIMIT,
    LLAMA2_70B,
    OPT_66B,
    PALM_62B,
    PLAIN,
    QWEN2_32B,
    RECOMP,
    TENSOR,
    Method,
    Shape,
    percent,
)
from debubble.papers.chronospipe.figures.messages import MESSAGES, message_models, throughput, throughputs
from debubble.papers.chronospipe.offload import STATE_BYTES
from debubble.papers.claims import Claim
from debubble.papers.drawings import Bars, Lines
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Exhibit, Table, number

PAPER = PrintedPaper.load("chronospipe")


def _throughput(
    statement: str,
    method: Method,
    reference: Method,
    p: int,
    m: int,
    paper: str,
    chosen: CommunicationModel = "receiver",
) -> Claim:
    """The claim of a throughput in percent of the reference; the reason lists the other communication models."""
    shares = {k: 100 * v for k, v in throughputs(method, reference, p, m).items()}
    alternatives = ", ".join(f"{value:.1f}% {MESSAGES[model]}" for model, value in shares.items())
    return PAPER.claim(
        "throughput.share",
        [shares[chosen]],
        printed=(paper,),
        kind="qualitative" if " to " in paper and chosen == "receiver" else "printed",
        statement=statement,
        messages=MESSAGES[chosen],
        others=alternatives,
    )


def figure_9a() -> Iterator[Exhibit]:
    """Memory and throughput of 48 layers."""
    printed, reference = PAPER.printed["figure-9a"], _total(HALF, 48)
    rows = tuple(
        (
            method.name,
            printed["activations"].get(method.name),
            round(48 * LAYER * method.activations(8), 2),
            round(48 * LAYER_STATES * method.states, 2),
            printed["share"].get(method.name),
            round(_total(method, 48) / reference, 3),
        )
        for method in (PLAIN, INTERLEAVED, HALF, INTERLEAVED_RECOMPUTED, CHRONOS, RECOMP, ALL)
    )
    table = PAPER.table("figure-9a", rows, name=HALF.name, throughput=throughput(ALL, HALF, 8, 64))
    ours = {row[0]: row for row in rows}
    over = [name for name, row in ours.items() if row[2] + row[3] > LIMIT]
    yield PAPER.claim("figure-9a.activations", [ours[method.name][2] for method in (CHRONOS, RECOMP, HALF)])
    yield PAPER.claim("figure-9a.all-memory", [100 * ours[ALL.name][5]])
    yield PAPER.claim("figure-9a.out-of-memory", ", ".join(over), printed=f"{PLAIN.name}, {INTERLEAVED.name}")
    yield _throughput("throughput of ALL in percent of 1F1B + R = 50%'s", ALL, HALF, 8, 64, "97.58")
    yield table
    messages = message_models()
    yield messages
    yield Bars(
        title="Figure 9a: GB per device, 48 layers, PP8 TP8",
        groups=list(ours),
        series={"activations": [row[2] for row in rows], "model states": [row[3] for row in rows]},
        unit="GB",
        stacked=True,
        limit=LIMIT,
    )
    yield Bars(
        title="Throughputs of Figures 9a, 11, 12 and 13 in percent of the reference, by model of messages",
        groups=[f"{row[0]}: {row[1]} of {row[2]}, {str(row[3]).split(',')[0]}" for row in messages.rows],
        series={name: messages.column(name) for name in messages.columns[5:]},
        unit="percent",
        limit=100,
    )


def largest_model(method: Method) -> int:
    """The largest number of layers that fits at PP8 TP8, a multiple of the number of stages."""
    step = 8 * method.chunks
    layers = step
    while _total(method, layers + step) <= LIMIT:
        layers += step
    return layers


def _total(method: Method, layers: int) -> float:
    """GB on a device."""
    return layers * (LAYER * method.activations(8) + LAYER_STATES * method.states)


def total_of(shape: Shape, method: Method) -> float:
    """GB on a device at PP8 TP8, micro-batch 2, 4K tokens; layers only."""
    activations = shape.layers * shape.layer_activation(2 * 4096)
    states = shape.layers * (STATE_BYTES * shape.layer_parameters / TENSOR / GB) / 8
    return activations * method.activations(8) + states * method.states


def figure_9b() -> Iterator[Exhibit]:
    """The largest models."""
    published = {method: PAPER.printed["figure-9b"][method.name] for method in (PLAIN, HALF, CHRONOS, RECOMP, ALL)}
    largest = {method: largest_model(method) for method in published}
    rows = tuple(
        (method.name, layers, largest[method], round(layers / 40, 2), round(largest[method] / largest[PLAIN], 2))
        for method, layers in published.items()
    )
    table = PAPER.table("figure-9b", rows, limit=LIMIT)
    yield PAPER.claim(
        "figure-9b.layers",
        list(largest.values()),
        printed=list(map(str, published.values())),
        names=", ".join(method.name for method in published),
    )
    yield PAPER.claim("figure-9b.all", [largest[ALL] / largest[method] for method in (PLAIN, HALF)])
    yield table
    yield Bars(
        title=table.title,
        groups=[method.name for method in published],
        series={"layers": list(largest.values())},
        paper={"layers": list(published.values())},
        unit="layers",
    )


def savings_10() -> Table:
    """Memory savings on GPT3-175B at 16K tokens."""
    layers, hidden, tokens, tensor = 96, 12288, 16384, 8
    layer = 32 * tokens * hidden / tensor / GB
    states = 18 * 175e9 / 64 / GB
    plain = layers * layer + states

    def saving(method: Method, stored: float = 1.0) -> float:
        return round(plain / (layers * layer * stored * method.activations(8) + states * method.states), 2)

    return PAPER.table(
        "savings-10",
        (
            ("Megatron-Kwai", 1.27, saving(PLAIN, 21 / 32), None, None),
            (RECOMP.name, 1.72, saving(RECOMP), 1.17, round(throughputs(RECOMP, FULL, 8, 32)["latency"], 3)),
            (ALL.name, 2.22, saving(ALL), None, None),
        ),
        throughput=throughput(RECOMP, FULL, 8, 32),
    )


def figure_10() -> Iterator[Exhibit]:
    """Other recomputation methods."""
    fitted, ours = savings_10(), planner_runs.figure_10()
    speeds = {row[:2]: row[4] for row in ours.rows}
    yield PAPER.claim("figure-10.saving", [row[2] for row in fitted.rows])
    yield PAPER.claim("figure-10.speed-chronos", [fitted.rows[1][4]])
    yield PAPER.claim("figure-10.speed-adapipe", [speeds["adapipe", 1.76]])
    yield PAPER.claim("figure-10.speed-chronospipe", [speeds["chronos", 1.72]])
    yield PAPER.claim(
        "figure-10.throughput-megatron", [100 * (1 - speeds["megatron-kwai", 1.27] / speeds["dapple", 1.0])]
    )
    yield fitted
    yield ours
    title = "Figure 10: speed over 1F1B + R = 100% in the memory of each saving, planned"
    yield ours.bars("speed", ["ours"], names="{}, saving {}", title=title, paper={"ours": ours.column(ours.columns[3])})


METHODS_11 = (PLAIN, INTERLEAVED, CHRONOS, HALF, INTERLEAVED_HALF, RECOMP, ALL)
LENGTHS = (2, 4, 8, 16)
"""Sequence lengths in thousands of tokens; the text names 8K only."""


def figure_11() -> Iterator[Exhibit]:
    """Sequence lengths at PP4."""
    blocking = throughputs(CHRONOS, PLAIN, 4, 32)["blocking"]
    chronos, recomp, half, interleaved = (m.activations(4) for m in (CHRONOS, RECOMP, HALF, INTERLEAVED_HALF))
    table = PAPER.table(
        "figure-11",
        (
            ("activations saved, Chronos-Pipe against 1F1B", "12.5%", percent(1 - chronos)),
            ("activations saved, Chronos-Recomp against 1F1B + R = 50%", "25%", percent(1 - recomp / half)),
            (
                "activations of interleaved 1F1B + R = 50% against 1F1B + R = 50%",
                "more: out of memory at 8K",
                percent(interleaved / half),
            ),
            ("throughput lost, Chronos-Pipe against 1F1B", "6% to 9%", percent(1 - blocking)),
        ),
        throughput=throughput(RECOMP, HALF, 4, 32),
    )
    parameters = 32 * LLAMA2_70B.layer_parameters / 4 / 8
    states = parameters * (6 + (STATE_BYTES - 6) / 2) / GB
    sizes: dict[str, list[str]] = {}
    for method in METHODS_11:
        # ZeRO-1 over two replicas halves the 12 bytes that Chronos-Offload moves.
        device_states = states - float(method.on_host) * parameters * (STATE_BYTES - 6) / 2 / GB
        totals = [32 * LAYER * length / 4 * method.activations(4) + device_states for length in LENGTHS]
        sizes[method.name] = [f"{gb:.1f}" if gb <= LIMIT else f"{gb:.1f} OOM" for gb in totals]
    memory = PAPER.table(
        "figure-11-gb-per",
        tuple((name, *cells) for name, cells in sizes.items()),
        limit=LIMIT,
    )
    long = sizes[INTERLEAVED_HALF.name][LENGTHS.index(8)]
    yield PAPER.claim("figure-11.saved", [number(row[2]) for row in table.rows[:2]])
    yield PAPER.claim("figure-11.interleaved", "out of memory" if "OOM" in long else f"{long} GB of {LIMIT}")
    yield _throughput(
        "throughput of Chronos-Pipe in percent of 1F1B's: 6% to 9% lower",
        CHRONOS,
        PLAIN,
        4,
        32,
        "91 to 94",
        "blocking",
    )
    yield _throughput(
        "throughput of Chronos-Recomp in percent of 1F1B + R = 50%'s: comparable", RECOMP, HALF, 4, 32, "97 to 103"
    )
    yield table
    yield memory
    yield Lines(
        title=memory.title,
        across="thousands of tokens",
        x=LENGTHS,
        series={name: [number(cell) for cell in cells] for name, cells in sizes.items()},
        unit="GB",
        limit=LIMIT,
    )


MODELS_12 = (QWEN2_32B, PALM_62B, OPT_66B)


def savings_12() -> Table:
    """Other dense models."""
    rows = []
    for shape in MODELS_12:
        half, full, recomp, everything = (total_of(shape, method) for method in (HALF, FULL, RECOMP, ALL))
        rows.append(
            (
                shape.name, round(half, 1), round(recomp, 1), round(everything, 1), round(half / recomp, 2),
                round(half / everything, 2), round(full / recomp, 2),
            )
        )  # fmt: skip
    return PAPER.table("savings-12", rows, throughput=throughput(RECOMP, FULL, 8, 64))


def figure_12() -> Iterator[Exhibit]:
    """Other dense models."""
    table, ours = savings_12(), planner_runs.figure_12()
    speeds = {row[:2]: row[4] for row in ours.rows}
    fit = [row[0] for row in table.rows if row[2] <= LIMIT]
    methods = (HALF, FULL, RECOMP, ALL)
    yield PAPER.claim("figure-12.saving-chronos", [row[4] for row in table.rows])
    yield PAPER.claim("figure-12.saving-all", [row[5] for row in table.rows])
    yield PAPER.claim("figure-12.models-that-fit", ", ".join(fit))
    yield _throughput(
        "throughput of Chronos-Recomp in percent of 1F1B + R = 100%'s", RECOMP, FULL, 8, 64, "115", "latency"
    )
    yield _throughput(
        "throughput of Chronos-Recomp in percent of 1F1B + R = 50%'s: similar", RECOMP, HALF, 8, 64, "97 to 103"
    )
    yield PAPER.claim("figure-12.speed-chronospipe", [speeds[shape.name, "chronos"] for shape in MODELS_12])
    yield PAPER.claim(
        "figure-12.saving-all-over-1f1b", [total_of(shape, FULL) / total_of(shape, ALL) for shape in MODELS_12]
    )
    yield table
    yield ours
    yield Bars(
        title="Figure 12: GB per device, layers only",
        groups=[shape.name for shape in MODELS_12],
        series={method.name: [total_of(shape, method) for shape in MODELS_12] for method in methods},
        unit="GB",
        limit=LIMIT,
    )
    yield Bars(
        title="Figure 12: speed over 1F1B + R = 100% in 32 GB, planned",
        groups=[shape.name for shape in MODELS_12],
        series={planner: [speeds[shape.name, planner] for shape in MODELS_12] for planner in planner_runs.PLANNERS_12},
        paper={"chronos": [1.15] * 3},
        unit="speed",
    )
