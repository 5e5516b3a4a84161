"""The report's strips and bars: the units of each device's stages, and its memory at the peak by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from debubble.formatting import size_words
from debubble.ir import Kind
from debubble.plans import Plan
from debubble.views.palette import KIND_COLORS, PART_COLORS, ink_on, recompute_colors
from debubble.views.rows import Rows, unit_runs
from debubble.views.scene import Scene


def partition_strip(plan: Plan) -> dict[str, Any]:
    """The stages of each device as runs of units with equal recomputation; widths are shares of the longest work."""
    names = list(dict.fromkeys(unit.strategy for stage in plan.partition for unit in stage if unit.strategy != "none"))
    names.sort(key=lambda name: (name == "full", name.count("+"), name))
    colors = {"none": KIND_COLORS[Kind.F]} | recompute_colors(names)
    moved = [0] * plan.schedule.stages
    for op in plan.schedule.operations:
        if op.kind is Kind.O:
            moved[op.stage] += 1
    costs = plan.costs
    work = [
        float(f + b + w) for f, b, w in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
    ]
    longest = max(sum(work[s] for s in stages) for stages in plan.schedule.placement.stages_of) or 1.0

    def stage_of(stage: int) -> dict[str, Any]:
        units = plan.partition[stage]
        groups = [(name, list(group)) for name, group in groupby(units, key=lambda unit: unit.strategy)]
        offload = f"offloads {moved[stage]} of {plan.schedule.micro_batches} micro-batches" if moved[stage] else ""
        host = "optimizer on the host" if stage in plan.schedule.host_steps else ""
        return {
            "number": stage,
            "share": f"{100 * work[stage] / longest:.3f}",
            "offload": f"{100 * moved[stage] / plan.schedule.micro_batches:.0f}" if moved[stage] else "",
            "host": bool(host),
            "words": "; ".join(filter(None, [f"stage {stage}: {', '.join(unit_runs(units))}", offload, host])),
            "runs": [
                {
                    "count": len(group),
                    "color": colors[name],
                    "ink": ink_on(colors[name]),
                    "words": ", ".join(unit_runs(group)) + (f", recomputing {name}" if name != "none" else ""),
                    "label": ", ".join(unit_runs(group)),
                }
                for name, group in groups
            ],
        }

    words = {name: "keeps everything" if name == "none" else f"recomputes {name}" for name in colors}
    return {
        "devices": [[stage_of(stage) for stage in stages] for stages in plan.schedule.placement.stages_of],
        "legend": [(words[name], color) for name, color in colors.items()],
        "offloads": any(moved),
        "hosts": bool(plan.schedule.host_steps),
    }


def memory_bars(scene: Scene) -> dict[str, Any]:
    """The memory of each device at its peak by part, as bars and as a table."""
    parts = scene.parts_at_the_peak
    limits = [None if limit is None else float(limit) for limit in scene.limits]
    rows = Rows(
        title="Memory at the peak, per device",
        columns=("device", *parts[0], "peak", "limit"),
        rows=[
            (str(d), *(size_words(size) for size in sizes.values()), size_words(scene.peak_memory[d]),
             size_words(scene.limits[d]))
            for d, sizes in enumerate(parts)
        ],
    )  # fmt: skip
    shown = [limit if limit is not None and limit <= scene.highest else None for limit in limits]
    named = [f"device {d}" for d in range(scene.devices)]
    return {**bars(named, parts, shown), "rows": rows}


def bars(names: Sequence[str], parts: Sequence[Mapping[str, float]], limits: Sequence[float | None]) -> dict[str, Any]:
    """Bars of memory by part, as shares of the longest bar or limit.

    Args:
        names: The label of each bar.
        parts: Bytes by part, of each bar.
        limits: Bytes at which each bar has a mark; None: no mark.
    """
    top = max([*(sum(sizes.values()) for sizes in parts), *(limit for limit in limits if limit is not None)]) or 1.0
    words = {size_words(limit) for limit in limits if limit is not None}
    return {
        "bars": [
            {
                "name": label,
                "parts": [(name, PART_COLORS[name], f"{100 * size / top:.3f}") for name, size in sizes.items()],
                "words": ", ".join(f"{name} {size_words(size)}" for name, size in sizes.items()),
                "limit": "" if limit is None else f"{100 * limit / top:.3f}",
                "peak": size_words(sum(sizes.values())),
            }
            for label, sizes, limit in zip(names, parts, limits, strict=True)
        ],
        "limit": words.pop() if len(words) == 1 else "",
    }
