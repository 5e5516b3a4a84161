"""Sums over a stage's units: its times and bytes, with recomputation, and how far transfers run next to computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from debubble.costs.unit import Strategy, Unit
from debubble.ir import Number

ADDED = ("gradient_reduce", "optimizer_step", "parameter_gather")
"""Entries of which units have a part."""
_OF_UNITS = ("forward", "backward_input", "backward_weight", "activation", "static", "gathered", *ADDED)
"""Entries of a stage that are sums of the same ones of its units."""


class StageSums(NamedTuple):
    """Sums over a stage's units."""

    forward: Number
    backward_input: Number
    backward_weight: Number
    recompute: Number
    activation: Number
    activation_after_input: Number
    activation_recomputed: Number
    recompute_workspace: Number
    recompute_workspace_input: Number
    static: Number
    static_on_host: Number
    workspace: Number
    gradient_reduce: Number
    optimizer_step: Number
    parameter_gather: Number
    gathered: Number
    offload_overlap: Number
    reload_overlap: Number
    recompute_overlap: Number


def sums_of(stage: Sequence[tuple[Unit, str]]) -> StageSums:
    """Add up units with their strategies, in model order."""
    runs = _recomputed_runs(stage)
    # Micro-batches of a stage that recomputes may yet keep everything.
    apart = _recomputed_runs([(unit, "none") for unit, _ in stage])
    ways = [runs, apart] if any(name != "none" for _, name in stage) else [apart]
    return StageSums(
        **{name: sum(getattr(unit, name) for unit, _ in stage) for name in _OF_UNITS},
        recompute=sum(u.strategies[s].recompute for u, s in stage),
        activation_after_input=sum(_after_input(u) for u, _ in stage),
        activation_recomputed=sum(run.kept for run in runs),
        recompute_workspace=_workspace(runs, left=[0] * len(runs)),
        recompute_workspace_input=_workspace(runs, left=[run.after_input for run in runs]),
        static_on_host=sum(u.on_host.static if u.on_host else u.static for u, _ in stage),
        workspace=max((u.workspace for u, _ in stage), default=0),
        offload_overlap=min(_overlap([(run.forward, run.kept) for run in way]) for way in ways),
        reload_overlap=min(
            _overlap([(run.recompute + time, run.kept) for run, time in zip(way, times, strict=True)])
            for way in ways
            for times in ([run.backward_input for run in way], [run.backward for run in way])
        ),
        recompute_overlap=_overlap([(run.recompute, run.kept) for run in reversed(runs)]),
    )


def _overlap(parts: Sequence[tuple[Number, Number]]) -> Number:
    """The overlap of a transfer with the computing of a stage's parts, given as (time, bytes kept).

    They are in model order, or in the opposite one where the first that computes is the first to come back.

    `streaming_lead` says what it means: at every part that keeps something, the share of time after it and that of the
    bytes before it together are at least that.
    """
    whole, kept = sum(time for time, _ in parts), sum(size for _, size in parts)
    least: Number = 1 if whole and kept else 0
    spent: Number = 0
    before: Number = 0
    for time, size in parts:
        spent += time
        if size:
            least = min(least, 1 - spent / whole + before / kept) if whole else 0
        before += size
    return max(least, 0)


class _RecomputedRun(NamedTuple):
    """Units of a stage that recompute together: bytes, and times."""

    kept: Number
    restored: Number
    after_input: Number
    forward: Number
    backward_input: Number
    backward: Number
    recompute: Number


def _workspace(runs: Sequence[_RecomputedRun], *, left: Sequence[Number]) -> Number:
    """The most bytes that going back through the runs needs beyond what the forward kept.

    A run's are restored when those after it have freed what they kept but for what they have `left`.
    """
    most: Number = 0
    after: Number = 0
    for run, stays in zip(reversed(runs), reversed(left), strict=True):
        most = max(most, after + run.restored)
        after += stays - run.kept
    return most


def _recomputed_runs(stage: Sequence[tuple[Unit, str]]) -> list[_RecomputedRun]:
    """Unit by unit, or layer by layer where two halves share one input."""
    runs: list[_RecomputedRun] = []
    previous: tuple[int | None, str] = (None, "none")
    for unit, name in stage:
        strategy = unit.strategies[name]
        if strategy.after_full is not None and previous == (unit.layer, "full"):
            runs.append(
                _RecomputedRun(*map(sum, zip(runs.pop(), _run(unit, strategy, strategy.after_full), strict=True)))
            )
        else:
            runs.append(_run(unit, strategy, strategy.activation))
        previous = unit.layer, name
    return runs


def _run(unit: Unit, strategy: Strategy, kept: Number) -> _RecomputedRun:
    """A unit that recomputes alone and keeps so many bytes."""
    backward = unit.backward_input + unit.backward_weight
    restored, after = unit.activation - kept, _after_input(unit)
    return _RecomputedRun(kept, restored, after, unit.forward, unit.backward_input, backward, strategy.recompute)


def _after_input(unit: Unit) -> Number:
    return unit.activation / 2 if unit.activation_after_input is None else unit.activation_after_input
