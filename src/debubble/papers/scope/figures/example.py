"""SCOPE's pictures: the schedules of its background, the three kinds of bubbles, and a running example.

The poster's pictures are not in its text.  The running example is ours: a model of 14 layers and a long head on four
devices, with memory for about half of what 1F1B keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Number, StageCosts
from debubble.papers.drawings import Bars, Timelines
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Table
from debubble.papers.scope.instance import LayerRun, layer_runs
from debubble.papers.scope.integer_program import ProgramAnswer, solve
from debubble.planners import planners
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.schedules import schedules
from debubble.search.effort import Effort
from debubble.simulator import Timeline, simulate

PAPER = PrintedPaper.of("scope")

DEVICES, MICRO_BATCHES = 4, 8
LIMIT = 80
"""Memory of a device."""


@dataclass(frozen=True)
class ThreeBubbles:
    """B_R, B_I and B_P of a 1F1B pipeline, and the step that they make up with the work."""

    recomputation: float
    imbalance: float
    preparation: float
    work: float

    @property
    def leaked(self) -> float:
        """All three bubbles."""
        return self.recomputation + self.imbalance + self.preparation

    @property
    def step(self) -> float:
        """The step's time by the poster's sum."""
        return self.work + self.leaked

    @staticmethod
    def of(timeline: Timeline) -> ThreeBubbles:
        """The bubbles by the formulas, from each device's time per micro-batch."""
        m = timeline.program.schedule.micro_batches
        times = [float(busy) / m for busy in timeline.busy]
        again = [float(time) / m for time in timeline.recompute]
        p, longest = len(times), max(times)
        return ThreeBubbles(
            recomputation=m * sum(again) / p,
            imbalance=m * (longest - sum(times) / p),
            preparation=sum(times) - longest,
            work=m * (sum(times) - sum(again)) / p,
        )


@cache
def solutions() -> dict[str, Solution]:
    """The running example by the planner that the poster compares with, and by SCOPE."""
    problem = Problem(devices=DEVICES, micro_batches=MICRO_BATCHES, workload=ModelUnits(units()), chunks=1, effort=2.0)
    return {name: planners[name].find(problem) for name in ("megatron-even", "scope")}


def units() -> Units:
    """The running example's model."""
    layer = {"none": Strategy(10), "selective": Strategy(6, 0.25), "full": Strategy(2, 1)}
    ends = {"none": Strategy(0)}
    return Units(
        units=(
            _unit("embedding", 0.2, ends),
            *(_unit("layer", 1, layer, number) for number in range(14)),
            _unit("head", 1.5, ends),
        ),
        memory_limit=(LIMIT,),
    )


def _unit(kind: str, time: Number, strategies: dict[str, Strategy], layer: int | None = None) -> Unit:
    return Unit(
        type=kind, layer=layer, forward=time, backward_input=time, backward_weight=time, static=0, strategies=strategies
    )


@cache
def runs() -> dict[str, Timeline]:
    """The running example, simulated."""
    return {name: simulate(solution.schedule, solution.costs) for name, solution in solutions().items()}


def program() -> tuple[list[LayerRun], ProgramAnswer]:
    """The running example's layer types with their strategies, and the answer of its integer program."""
    runs, schedule = layer_runs(units()), schedules["1f1b"](devices=DEVICES, micro_batches=MICRO_BATCHES)
    return runs, solve(runs, schedule, limits=[LIMIT] * DEVICES, static=0.0, effort=Effort(2.0), seed=0)


def bubbles_table() -> Table:
    """The three bubbles of the running example."""
    rows: list[tuple[Cell, ...]] = []
    for name, timeline in runs().items():
        bubbles = ThreeBubbles.of(timeline)
        figures = bubbles.work, bubbles.recomputation, bubbles.imbalance, bubbles.preparation, bubbles.step
        rows.append((name, *(round(figure, 2) for figure in figures), round(float(timeline.makespan), 2)))
    return PAPER.table("bubbles-table", rows)


def drawn() -> Timelines:
    """The running example."""
    return Timelines.of(runs())


def bubbles_drawn() -> Bars:
    """The three bubbles, on each other."""
    table = bubbles_table()
    return Bars(
        title="The three kinds of bubbles of the running example",
        groups=[row[0] for row in table.rows],
        series={
            name: [row[at + 1] for row in table.rows]
            for at, name in enumerate(("work", "recomputation", "imbalance", "preparation"))
        },
        unit="forwards of a layer",
        stacked=True,
    )


def background() -> Timelines:
    """GPipe, 1F1B and interleaved 1F1B."""
    made = {
        "GPipe": schedules["gpipe"](devices=4, micro_batches=8),
        "1F1B": schedules["1f1b"](devices=4, micro_batches=8),
        "Interleaved 1F1B, v = 2": schedules["interleaved"](devices=4, micro_batches=8, chunks=2),
    }
    return Timelines.of({title: simulate(each, _equal(each.stages)) for title, each in made.items()})


def _equal(stages: int) -> StageCosts:
    """Stages that divide the same work."""
    time = DEVICES / stages
    return StageCosts.of(stages=stages, forward=time, backward_input=time, backward_weight=time, activation=time)
