"""The timelines of Obscura's Figures 1, 6, 9 and 10, drawn from the schedules themselves.

The figures' sizes follow from the text: p = 2, m = 6 and p = 3, m = 8, k = 1; f = 1, b = 2, and a stage that recomputes
keeps 4 of 10.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from debubble.ir import Number, StageCosts
from debubble.reproduce.obscura.runs import on_demand
from debubble.schedules.obscura.migration import obscura
from debubble.simulator import simulate
from debubble.views import Scene, views

Line = tuple[str, str, int]
"""Title, schedule, how many stages recompute or are adjusted."""

FIGURE_1: tuple[Line, ...] = (
    ("all stages recompute", "1f1b", 2),
    ("recomputation on demand", "1f1b", 1),
    ("strawman", "strawman", 1),
    ("Obscura", "obscura", 1),
)
FIGURE_6: tuple[Line, ...] = (("1F1B with recomputation on stages 0 and 1", "1f1b", 2), ("strawman", "strawman", 2))
FIGURE_9: tuple[Line, ...] = (
    ("strawman", "strawman", 2),
    ("dependency relaxation", "dependency-relaxed", 2),
    ("migration refinement: Obscura", "obscura", 2),
)


def draw(folder: Path) -> tuple[Path, ...]:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "obscura-figure-1.png": _compared(FIGURE_1, devices=2, micro_batches=6, recompute=1),
        "obscura-figure-6.png": _compared(FIGURE_6, devices=3, micro_batches=8, recompute=1),
        "obscura-figure-9.png": _compared(FIGURE_9, devices=3, micro_batches=8, recompute=Fraction(1, 2)),
        "obscura-figure-10.png": _swapping(),
    }
    for name, scenes in figures.items():
        (folder / name).write_bytes(views["png"](scenes))
    return tuple(folder / name for name in figures)


def _compared(lines: tuple[Line, ...], *, devices: int, micro_batches: int, recompute: Number) -> list[Scene]:
    """The schedules under each other."""
    costs = _costs(devices, recompute)
    scenes = []
    for title, name, stages in lines:
        schedule = on_demand(name, devices=devices, micro_batches=micro_batches, stages=stages)
        scenes.append(Scene.of(simulate(schedule, costs), title=title))
    return scenes


def _swapping() -> list[Scene]:
    """Stage 0 of three without swapping, and with three of its seven blocks away."""
    scenes = []
    for blocks, limit in ((0, (28, 20, 10)), (3, (16, 20, 10))):
        costs = _costs(3, Fraction(1, 2)).replace(offload=Fraction(5, 2), memory_limit=limit)
        schedule = obscura(devices=3, micro_batches=13, adjusted_stages=1, swapped_blocks=blocks)
        scenes.append(Scene.of(simulate(schedule, costs), title=f"Obscura, {blocks or 'no'} blocks swapped"))
    return scenes


def _costs(devices: int, recompute: Number) -> StageCosts:
    return StageCosts.of(
        stages=devices, recompute=recompute, activation=10, activation_recomputed=4, recompute_workspace=0
    )
