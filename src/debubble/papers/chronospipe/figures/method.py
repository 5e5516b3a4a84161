"""ChronosPipe, sections 1 to 5: memory under 1F1B, Chronos-Pipe, Chronos-Recomp, ZeRO-2 variant, Chronos-Offload."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from debubble.costs import Cluster, model_units
from debubble.formatting import listed
from debubble.ir import Kind, RunOptions, StageCosts
from debubble.ir.stage_costs import CommunicationModel
from debubble.models import models
from debubble.papers.chronospipe.figures.memory_model import (
    ALL,
    CHRONOS,
    GB,
    HALF,
    INTERLEAVED,
    LLAMA2_70B,
    PLAIN,
    RECOMP,
    Method,
    percent,
)
from debubble.papers.chronospipe.offload import (
    available_offload,
    available_upload,
    offload_activations,
    offload_states,
    step_window,
    upload_window,
)
from debubble.papers.chronospipe.schedule import delay_rounds
from debubble.papers.drawings import Bars, Timelines
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Exhibit, Table, number
from debubble.schedules import schedules
from debubble.simulator import Timeline, simulate

PAPER = PrintedPaper.load("chronospipe")

A100_MEMORY = 80
"""GB of an A100, the device of Figure 1."""


def figure_1() -> Iterator[Exhibit]:
    """Memory under 1F1B, and the unused memory of its last stage."""
    rows = []
    for scale, length, activation, states in PAPER.printed["figure-1"]:
        layers = scale * LLAMA2_70B.layers
        # The paper rounds a layer's activations (0.44 GB) before it multiplies.
        layer = round(LLAMA2_70B.layer_activation(2 * 1024 * length), 2)
        ours = layers * layer * PLAIN.activations(8)
        state = 18 * 70e9 * scale / 64 / GB
        rows.append(
            (f"{70 * scale}B, {length}K", activation, round(ours, 2), states, round(state, 2),
             round(activation + states, 2), round(ours + state, 2))
        )  # fmt: skip
    table = PAPER.table("figure-1", rows)
    ends = PLAIN.run(4, 16).peak_memory
    yield PAPER.claim("figure-1.activations", [row[2] for row in table.rows])
    yield PAPER.claim("figure-1.states", [row[4] for row in table.rows])
    large = [row[0] for row in table.rows if row[6] > A100_MEMORY]
    yield PAPER.claim("figure-1.out-of-memory", listed(large), a100=A100_MEMORY)
    yield PAPER.claim("figure-1.peaks", [float(ends[0]), float(ends[-1])])
    yield table
    yield Bars(
        title="Figure 1a: GB per device under 1F1B",
        groups=[row[0] for row in table.rows],
        series={"activations": [row[2] for row in table.rows], "model states": [row[4] for row in table.rows]},
        unit="GB",
        stacked=True,
        limit=A100_MEMORY,
    )
    yield _timelines(("1F1B, p = 4", "1f1b", STAGES))


def figure_2() -> Iterator[Exhibit]:
    """Interleaved 1F1B and breadth-first schedules."""
    peaks = [INTERLEAVED.activations(p) for p in (4, 8, 16)]
    yield PAPER.claim("figure-2.peak-interleaved", peaks)
    runs = {p: INTERLEAVED.run(p, 4 * p) for p in (4, 8)}
    yield PAPER.claim(
        "figure-2.blocks", [count for run in runs.values() for count in max(run.program.schedule.in_flight(0), key=sum)]
    )
    yield PAPER.claim("figure-2.bubble", [_bubble(run) / _bubble(PLAIN.run(p, 4 * p)) for p, run in runs.items()])
    yield PAPER.claim("figure-2.traffic", [_reduced_and_gathered()])
    yield _timelines(
        ("Interleaved 1F1B, v = 2 (Figure 2a)", "interleaved", CHUNKS),
        ("Breadth-first, v = 2 (Figure 2b)", "breadth-first", CHUNKS),
    )


def _bubble(run: Timeline) -> float:
    return float(run.makespan - run.busy[0])


def _reduced_and_gathered() -> float:
    """Time of gradient reduction plus weight gathering over that of gradient reduction, by our cost model."""
    cluster = Cluster.parse("64xH100-80GB")
    options = RunOptions(sequence_length=4096, tensor=8, data=8, zero=3)
    unit = model_units(models["llama2-70b"], cluster, options, pipeline=1).units[2]
    return float((unit.gradient_reduce + unit.parameter_gather) / unit.gradient_reduce)


def times_and_peaks() -> Table:
    """Section 4: step times and peaks for several p."""
    rows = []
    for p in (4, 8, 12, 16):
        m = 64
        run, recomp = CHRONOS.run(p, m), RECOMP.run(p, m)
        rows.append(
            (p, 6 * (m + p - 1), int(run.makespan), percent(float(run.peak_memory[0])), 6 * p + 7 * (m - 1),
             int(recomp.makespan), percent(float(recomp.peak_memory[0])))
        )  # fmt: skip
    return PAPER.table("times-and-peaks", rows)


def figure_5() -> Iterator[Exhibit]:
    """Chronos-Pipe: memory, time and messages."""
    table = times_and_peaks()
    blocking = {method: method.run(4, 128, message=0.05, model="blocking").makespan for method in (PLAIN, CHRONOS)}
    overhead = [100 * (1 - 6 * 128 / float(time)) for time in blocking.values()]
    yield PAPER.claim("figure-5.time", [row[2] for row in table.rows], printed=[str(row[1]) for row in table.rows])
    yield PAPER.claim("figure-5.peak-share", [number(row[3]) for row in table.rows])
    yield PAPER.claim("figure-5.peak-formula", [100 * CHRONOS.activations(LONG_PIPELINE)], stages=LONG_PIPELINE)
    yield PAPER.claim("figure-5.message-bubbles", overhead)
    yield PAPER.claim("figure-5.times-as-many", [_messages_of(v) / _messages_of(1) for v in (2, 3, 4)])
    yield table
    yield _timelines(("1F1B", "1f1b", STAGES), ("Chronos-Pipe, v = 2 (Figure 5a)", "chronos", CHUNKS))
    yield _messages()


LONG_PIPELINE = 128
"""A p at which the peak is within a percent of its limit for large p."""


def _messages_of(chunks: int) -> float:
    """Time that blocking messages of T_c = 0.05 T_unit add to a step of four devices."""
    method = PLAIN if chunks == 1 else Method("", "chronos", chunks)
    waiting, free = (method.run(4, 128, message=time, model="blocking").makespan for time in (0.05, 0))
    return float(waiting - free)


def figure_6() -> Iterator[Exhibit]:
    """Chronos-Recomp."""
    table = times_and_peaks()
    delays = {p: delay_rounds(p) for p in (4, 8, 10, 12, 16, 24, 27, 32, 36, 40)}
    yield PAPER.claim("figure-6.time", [row[5] for row in table.rows], printed=[str(row[4]) for row in table.rows])
    yield PAPER.claim("figure-6.kept", [100 * (RECOMP.activations(8) - 1 / 16)])
    yield PAPER.claim("figure-6.saved", [(1 - (RECOMP.activations(8) - 1 / 16)) / (1 - HALF.activations(8))])
    yield PAPER.claim("figure-6.equation-8", [k for p, k in delays.items() if p not in (4, 32)], printed=["1"] * 8)
    yield PAPER.table("figure-6", tuple((p, 1 if 8 <= p <= 40 else 0, k) for p, k in delays.items()))
    yield _timelines(
        ("Chronos-Recomp, p = 4 (Figure 6a)", "chronos-recomp", CHUNKS),
        ("Chronos-Recomp, p = 8 (Figure 6b)", "chronos-recomp", StageCosts.of(stages=16)),
    )


def figure_7() -> Iterator[Exhibit]:
    """The ZeRO-2 variant."""
    shares = [float(Method("", "chronos-zero2", 2).run(p, 32).peak_memory[0]) for p in (4, 8, 16)]
    more = [2 * p * (share - CHRONOS.activations(p)) for p, share in zip((4, 8, 16), shares, strict=True)]
    made = schedules["chronos-zero2"](devices=4, micro_batches=8, chunks=2, costs=CHUNKS)
    reductions = sum(op.kind is Kind.G for order in made.orders for op in order)
    yield PAPER.claim("figure-7.peak", more)
    yield PAPER.claim("figure-7.reductions", [reductions / (8 * 8)])
    yield _timelines(("ZeRO-2 variant, g = 2", "chronos-zero2", StageCosts.of(stages=8, gradient_reduce=2)))


def figure_8() -> Iterator[Exhibit]:
    """Chronos-Offload."""
    table = PAPER.table("figure-8", tuple((p, *_windows(p)) for p in (4, 8, 12, 16)))
    yield PAPER.claim(
        "figure-8.equation-4", [row[2] for row in table.rows], printed=[str(row[1]) for row in table.rows]
    )
    yield PAPER.claim(
        "figure-8.equation-6", [row[4] for row in table.rows], printed=[str(row[3]) for row in table.rows]
    )
    yield PAPER.claim(
        "figure-8.equations-5",
        [window(LARGE_P) / LARGE_P for window in (available_offload, available_upload)],
        large=LARGE_P,
    )
    yield PAPER.claim("figure-8.share-model", [100 * (1 - (1 - ALL.states) * 2)])
    yield table
    yield _offload()


LARGE_P = 1000
"""A large p, at which equations (4) and (6) are close to their limits."""


def _windows(p: int) -> tuple[int, ...]:
    """Device 0's idle backwards (cool-down) and idle forwards (warm-up), each by the paper's formula and simulated."""
    run = CHRONOS.run(p, 2 * p + 2)
    idle = int(step_window(run, device=0, chunk=1) / 2), int(upload_window(run))
    return available_offload(p), idle[0], available_upload(p), idle[1]


STAGES = StageCosts.of(stages=4, forward=2, backward_input=2, backward_weight=2, activation=2)
"""Costs of four 1F1B stages in T_unit."""
CHUNKS = StageCosts.of(stages=8)
"""Costs in T_unit of eight stages, two chunks on each of 4 devices."""


def _timelines(*lines: tuple[str, str, StageCosts]) -> Timelines:
    """Simulated timelines of (title, schedule name, stage costs)."""
    timelines = {}
    for title, name, costs in lines:
        entry = schedules[name]
        devices = costs.stages // entry.default_chunks
        timelines[title] = simulate(
            entry(devices=devices, micro_batches=8, chunks=entry.default_chunks, costs=costs), costs
        )
    return Timelines.from_timelines(timelines)


def _messages() -> Timelines:
    """Figure 5b: Chronos-Pipe with nonzero T_c under every communication model."""
    models: dict[CommunicationModel, str] = {
        "blocking": "messages block both ends",
        "receiver": "the receiver waits",
        "latency": "asynchronous messages",
    }
    slow = CHUNKS.replace(communication=Fraction(1, 4))
    return _timelines(
        *(
            (f"Chronos-Pipe, T_c = T_unit / 4, {words}", "chronos", slow.replace(communication_model=model))
            for model, words in models.items()
        )
    )


def _offload() -> Timelines:
    """Figure 8, without and with the activations of the shallow chunk offloaded."""
    costs = CHUNKS.replace(gradient_offload=1.5, host_step=2.5, parameter_load=2, offload=2)
    made = schedules["chronos"](devices=4, micro_batches=8, chunks=2, costs=costs)
    states = offload_states(made, chunks=[1])
    both = offload_activations(states, chunks=[0], costs=costs)
    return Timelines.from_timelines(
        {
            "Chronos-Offload of chunk 1 (Figure 8)": simulate(states, costs),
            "With the activations of chunk 0 offloaded too": simulate(both, costs),
        }
    )
