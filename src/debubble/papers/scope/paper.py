"""SCOPE's poster: the claims of each section."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from debubble.papers.claims import Claim
from debubble.papers.drawings import Bars
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Entry, Exhibit, Paper, number, papers
from debubble.papers.scope.figures import example, tables
from debubble.papers.scope.figures.tables import EVEN, answer
from debubble.papers.scope.instance import partition_of_layers
from debubble.planners.partitioning.balance import even_counts
from debubble.simulator import Timeline

PAPER = PrintedPaper.load("scope")


def _idle(timeline: Timeline) -> float:
    busy = sum(map(float, timeline.busy))
    return 1 - busy / (len(timeline.busy) * float(timeline.makespan))


def background() -> Iterator[Exhibit]:
    """GPipe, 1F1B and interleaved 1F1B."""
    drawing = example.background()
    gpipe, plain, interleaved = (scene.timeline for scene in drawing.scenes)
    yield PAPER.claim(
        "background.schedules", plain.peak_memory[0] < gpipe.peak_memory[0] and _idle(interleaved) < _idle(plain)
    )
    yield drawing


def motivation() -> Iterator[Exhibit]:
    """Three kinds of bubbles, and their reduction by a holistic planner."""
    even, scope = (example.ThreeBubbles.from_timeline(run) for run in example.runs().values())
    fewer = scope.leaked < even.leaked
    table = example.bubbles_table()
    yield PAPER.claim(
        "motivation.step", [row[6] for row in table.rows], printed=[f"{row[5]:.2f}" for row in table.rows]
    )
    yield PAPER.claim("motivation.leaks", fewer)
    yield table
    yield example.bubbles_drawn()


def algorithm_1() -> Iterator[Exhibit]:
    """The planner's four phases, on the running example."""
    types, answer = example.program()
    placed = [sum(map(sum, options)) for options in answer.layers]
    partition = partition_of_layers(types, answer.layers)
    order = [index for stage in partition for index, _ in stage]
    yield PAPER.claim("algorithm-1.phase-1", [len(layer_type.options) for layer_type in types])
    yield PAPER.claim("algorithm-1.phase-2", placed, printed=[str(layer_type.count) for layer_type in types])
    yield PAPER.claim("algorithm-1.phase-3", answer.gap < OPTIMAL_GAP)
    yield PAPER.claim("algorithm-1.phase-4", order == list(range(len(example.units().units))))


OPTIMAL_GAP = 1e-6
"""Relative gap below which a solution counts as optimal."""


def running_example() -> Iterator[Exhibit]:
    """The running example, planned by SCOPE and Megatron-Even."""
    solutions, runs = example.solutions(), example.runs()
    partition = solutions["scope"].partition
    assert partition is not None, "units are divided"
    even = even_counts(example.units(), example.DEVICES)
    faster = runs["scope"].makespan < runs["megatron-even"].makespan
    yield PAPER.claim("running-example.faster", faster and list(partition.lengths) != list(even))
    yield example.drawn()


def end_to_end() -> Iterator[Exhibit]:
    """LLaMA-175B."""
    table = tables.end_to_end(answer)
    rows = {row[:4]: row[4:] for row in table.rows}
    published = [(key, poster, ours) for key, (poster, ours, _) in rows.items() if poster is not None]
    scope = {"full": "SCOPE dual", TRI: "SCOPE tri", "all": "SCOPE, R, I and P"}
    same = [[rows[name, which, "1F1B", EVEN][1] for name in (ours, "AdaPipe")] for which, ours in scope.items()]
    yield from (
        PAPER.claim(
            "end-to-end.second-reading"
            if key[0] in READINGS["two and three kinds of bubbles"][3:]
            else "end-to-end.speed-up",
            [ours],
            printed=(f"{poster:.2f}",),
            because=BECAUSE.get(key[0]),
            fewest=_formatted(rows[key][2]),
            planner=key[0],
            operators=key[1],
            schedule=key[2],
            over=key[3],
        )
        for key, poster, ours in published
    )
    yield from (_order(reading, names, rows) for reading, names in READINGS.items())
    yield PAPER.claim("end-to-end.same-operators", _none_slower(same))
    yield table
    yield Bars(
        title=table.title,
        groups=[f"{key[0]} ({key[1]}), {key[2]}" for key, _, _ in published],
        series={"ours": [ours for *_, ours in published]},
        paper={"ours": [poster for _, poster, _ in published]},
        unit="speed-up",
    )


def _none_slower(pairs: Iterable[Sequence[float | None]]) -> bool:
    """Tell whether in every pair the first is at least as fast as the second, if the second fits (is not None)."""
    return all(other is None or (one is not None and one >= other) for one, other in pairs)


def _order(reading: str, names: Sequence[str], rows: Mapping[tuple[str, ...], tuple[float | None, ...]]) -> Claim:
    """The claim on the planners' order from slow to fast, under a reading of dual and tri; only plans that fit."""
    ours = {key[0]: figure for key, (_, figure, _) in rows.items() if key[0] in names and key[2:] == ("1F1B", EVEN)}
    ours["AdaPipe"] = rows["AdaPipe", "all", "1F1B", EVEN][1]
    fitting = {name: speed_up for name in names if (speed_up := ours[name]) is not None}
    return PAPER.claim(
        "end-to-end.order",
        ", ".join(sorted(fitting, key=fitting.__getitem__)),
        printed=", ".join(names),
        reading=reading,
    )


def _formatted(figure: float | None) -> str:
    return "none" if figure is None else f"{figure:.2f}"


READINGS: Mapping[str, Sequence[str]] = PAPER.printed["order"]
"""Readings of dual and tri -> the planners from slow to fast."""
TRI = "selective, full"
BECAUSE: Mapping[str, str] = PAPER.printed["because"]


def scalability() -> Iterator[Exhibit]:
    """More devices."""
    table = tables.scalability(answer)
    fewest = (", ".join(_formatted(row[column]) for row in table.rows) for column in (3, 5))
    yield PAPER.claim("scalability.plain", [row[2] for row in table.rows], fewest=next(fewest))
    yield PAPER.claim("scalability.interleaved", [row[4] for row in table.rows], fewest=next(fewest))
    yield PAPER.claim("scalability.mfu", [number(table.rows[column][7]) for column in (0, -1)])
    yield table
    yield table.bars("speed-up", tables.GAINS, names="{} devices")


def generality() -> Iterator[Exhibit]:
    """Other models."""
    table = tables.generality(answer)
    yield PAPER.claim(
        "generality.gain",
        [row[3] for row in table.rows],
        names=", ".join(str(row[0]) for row in table.rows),
        fewest=", ".join(_formatted(row[4]) for row in table.rows),
    )
    yield table
    yield table.bars("gain", tables.GAINS)


def memory() -> Iterator[Exhibit]:
    """Use of device memory."""
    table = tables.memory(answer)

    def shares(column: int) -> list[float | None]:
        return [None if row[column] is None else number(row[column]) for row in table.rows]

    names = ", ".join(dict.fromkeys(f"{row[0]} on {row[1]}" for row in table.rows))
    fewest = ", ".join(str(row[4]) for row in table.rows)
    yield PAPER.claim("memory.even", shares(3), names=names, fewest=fewest)
    yield PAPER.claim("memory.tri", shares(6))
    yield PAPER.claim(
        "memory.gain", [row[8] for row in table.rows], fewest=", ".join(_formatted(row[9]) for row in table.rows)
    )
    yield table
    yield Bars(
        title=table.title,
        groups=[f"{row[0]}, {row[1]} devices" for row in table.rows],
        series={"Megatron-Even": shares(3), "SCOPE tri": shares(6)},
        unit="percent",
        limit=100,
    )


papers.add(
    "scope",
    Paper(
        name="scope",
        title="SCOPE: Symbolic Computation-Memory Optimization for Pipeline Efficiency (DPEXA 2025, a poster)",
        entries=(
            Entry("Background", "GPipe, 1F1B and interleaved 1F1B", background),
            Entry("Motivation", "three kinds of bubbles", motivation),
            Entry("Algorithm 1", "the planner", algorithm_1),
            Entry("Running example", "uneven stages with strategies of their own", running_example),
            Entry("End-to-end performance", "LLaMA-175B on 16,384 devices", end_to_end, slow=True),
            Entry("Scalability", "1,024 to 16,384 devices", scalability, slow=True),
            Entry("Generality", "seven models", generality, slow=True),
            Entry("Memory utilization", "64 to 128 devices", memory, slow=True),
        ),
    ),
)
