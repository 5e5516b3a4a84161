"""SCOPE's schedules of the background section, the three kinds of bubbles, and a running example.

The running example is ours, since the poster's text does not describe its own: a model of 14 layers and a long head on
four devices, with memory for about half of 1F1B's activations.
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
from debubble.papers.scope.instance import LayerType, layer_types
from debubble.papers.scope.integer_program import ProgramAnswer, solve
from debubble.planners import planners
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.schedules import schedules
from debubble.search.effort import Effort
from debubble.simulator import Timeline, simulate

PAPER = PrintedPaper.load("scope")

DEVICES, MICRO_BATCHES = 4, 8
LIMIT = 80
"""Memory of a device, D_M, in units of which a layer stores 10 per micro-batch."""


@dataclass(frozen=True)
class ThreeBubbles:
    """B_R, B_I and B_P of a 1F1B pipeline, and its work without bubbles."""

    recomputation: float
    imbalance: float
    preparation: float
    work: float

    @property
    def leaked(self) -> float:
        """B_G = B_R + B_I + B_P."""
        return self.recomputation + self.imbalance + self.preparation

    @property
    def step(self) -> float:
        """The step time by the poster's sum."""
        return self.work + self.leaked

    @staticmethod
    def from_timeline(timeline: Timeline) -> ThreeBubbles:
        """Compute the bubbles by the formulas of `integer_program`, from each device's time per micro-batch."""
        m = timeline.program.schedule.micro_batches
        times = [float(busy) / m for busy in timeline.busy]
        recompute = [float(time) / m for time in timeline.recompute]
        p, longest = len(times), max(times)
        return ThreeBubbles(
            recomputation=m * sum(recompute) / p,
            imbalance=m * (longest - sum(times) / p),
            preparation=sum(times) - longest,
            work=m * (sum(times) - sum(recompute)) / p,
        )


@cache
def solutions() -> dict[str, Solution]:
    """The running example planned by Megatron-Even and by SCOPE."""
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


def program() -> tuple[list[LayerType], ProgramAnswer]:
    """The running example's layer types, and the solution of its integer program."""
    types, schedule = layer_types(units()), schedules["1f1b"](devices=DEVICES, micro_batches=MICRO_BATCHES)
    return types, solve(types, schedule, limits=[LIMIT] * DEVICES, static=0.0, effort=Effort(2.0), seed=0)


def bubbles_table() -> Table:
    """The three bubbles of the running example."""
    rows: list[tuple[Cell, ...]] = []
    for name, timeline in runs().items():
        bubbles = ThreeBubbles.from_timeline(timeline)
        figures = bubbles.work, bubbles.recomputation, bubbles.imbalance, bubbles.preparation, bubbles.step
        rows.append((name, *(round(figure, 2) for figure in figures), round(float(timeline.makespan), 2)))
    return PAPER.table("bubbles-table", rows)


def drawn() -> Timelines:
    """The running example."""
    return Timelines.from_timelines(runs())


def bubbles_drawn() -> Bars:
    """The three bubbles as stacked bars."""
    table = bubbles_table()
    return Bars(
        title="The three kinds of bubbles of the running example",
        groups=[row[0] for row in table.rows],
        series={
            name: [row[column + 1] for row in table.rows]
            for column, name in enumerate(("work", "recomputation", "imbalance", "preparation"))
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
    return Timelines.from_timelines({title: simulate(s, _equal(s.stages)) for title, s in made.items()})


def _equal(stages: int) -> StageCosts:
    """Costs of equal stages with the same total work."""
    time = DEVICES / stages
    return StageCosts.of(stages=stages, forward=time, backward_input=time, backward_weight=time, activation=time)
