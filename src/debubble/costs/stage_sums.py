"""Sums over a stage's units: its times and bytes with recomputation, and how far transfers overlap with computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from debubble.costs.unit import Strategy, Unit
from debubble.ir import Number

ADDED = ("gradient_reduce", "optimizer_step", "parameter_gather")
"""Entries that have a term per unit and a term per stage."""
_SUMMED = ("forward", "backward_input", "backward_weight", "activation", "static", "gathered", *ADDED)
"""Entries of a stage that are sums of its units' entries of the same name."""


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
    # Some micro-batches of a stage that recomputes may keep everything.
    uncheckpointed = _recomputed_runs([(unit, "none") for unit, _ in stage])
    variants = [runs, uncheckpointed] if any(name != "none" for _, name in stage) else [uncheckpointed]
    return StageSums(
        **{name: sum(getattr(unit, name) for unit, _ in stage) for name in _SUMMED},
        recompute=sum(u.strategies[s].recompute for u, s in stage),
        activation_after_input=sum(_after_input(u) for u, _ in stage),
        activation_recomputed=sum(run.saved for run in runs),
        recompute_workspace=_workspace(runs, retained=[0] * len(runs)),
        recompute_workspace_input=_workspace(runs, retained=[run.after_input for run in runs]),
        static_on_host=sum(u.on_host.static if u.on_host else u.static for u, _ in stage),
        workspace=max((u.workspace for u, _ in stage), default=0),
        offload_overlap=min(_overlap([(run.forward, run.saved) for run in variant]) for variant in variants),
        reload_overlap=min(
            _overlap([(run.recompute + time, run.saved) for run, time in zip(variant, times, strict=True)])
            for variant in variants
            for times in ([run.backward_input for run in variant], [run.backward for run in variant])
        ),
        recompute_overlap=_overlap([(run.recompute, run.saved) for run in reversed(runs)]),
    )


def _overlap(runs: Sequence[tuple[Number, Number]]) -> Number:
    """The fraction of a transfer that overlaps with the computing of a stage's runs, given as (time, saved bytes).

    Runs are in model order, or in reverse where the one that computes first is reloaded first.

    The overlap (see `streaming_lead`) is the minimum, over all runs that save something, of the fraction of time after
    the run plus the fraction of bytes before it.
    """
    total_time, total_bytes = sum(time for time, _ in runs), sum(size for _, size in runs)
    overlap: Number = 1 if total_time and total_bytes else 0
    spent: Number = 0
    before: Number = 0
    for time, size in runs:
        spent += time
        if size:
            overlap = min(overlap, 1 - spent / total_time + before / total_bytes) if total_time else 0
        before += size
    return max(overlap, 0)


class _RecomputedRun(NamedTuple):
    """Bytes and times of consecutive units of a stage that recompute together."""

    saved: Number
    restored: Number
    after_input: Number
    forward: Number
    backward_input: Number
    backward: Number
    recompute: Number


def _workspace(runs: Sequence[_RecomputedRun], *, retained: Sequence[Number]) -> Number:
    """Peak bytes that the backward through the runs needs beyond what the forward saved.

    Runs are recomputed one at a time, from the last; a finished one has freed what it saved but for `retained` bytes.
    """
    peak: Number = 0
    after: Number = 0
    for run, remaining in zip(reversed(runs), reversed(retained), strict=True):
        peak = max(peak, after + run.restored)
        after += remaining - run.saved
    return peak


def _recomputed_runs(stage: Sequence[tuple[Unit, str]]) -> list[_RecomputedRun]:
    """One run per unit, or per layer where its two halves share one saved input."""
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


def _run(unit: Unit, strategy: Strategy, saved: Number) -> _RecomputedRun:
    """The run of one unit that saves these bytes."""
    backward = unit.backward_input + unit.backward_weight
    restored, after = unit.activation - saved, _after_input(unit)
    return _RecomputedRun(saved, restored, after, unit.forward, unit.backward_input, backward, strategy.recompute)


def _after_input(unit: Unit) -> Number:
    return unit.activation / 2 if unit.activation_after_input is None else unit.activation_after_input
