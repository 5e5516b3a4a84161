"""Phrases on a plan's recomputation, offload and host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from debubble.formatting import size_words
from debubble.ir import Kind
from debubble.planners.analysis.explanation import Explanation
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.plans import Plan
from debubble.targets.target import targets


class Detail(str):
    """A phrase that is left out where the screen is full."""

    __slots__ = ()


STRATEGIES_SHOWN = 2
"""Number of recomputation strategies that are named; if several remain, they are counted together."""
FULL_HOST_SHARE = 0.95
"""Fraction of the host memory above which a plan may not fit, as the system needs some of it."""


def unit_words(plan: Plan) -> str:
    """The name of the partition's units: half-layers or layers."""
    return "half-layers" if any(unit.type == "mlp" for stage in plan.partition for unit in stage) else "layers"


def recomputation_words(plan: Plan) -> Iterator[str]:
    """Phrases on the recomputation strategies, with the number of units of each."""
    strategies = Counter(unit.strategy for stage in plan.partition for unit in stage if unit.layer is not None)
    total = sum(strategies.values())
    ways = [(name, count) for name, count in strategies.most_common() if name != "none"]
    shown = len(ways) if len(ways) == STRATEGIES_SHOWN + 1 else STRATEGIES_SHOWN
    for n, (name, count) in enumerate(ways[:shown]):
        yield f"{name} in {count}{f' of {total} {unit_words(plan)}' if n == 0 else ''}"
    if rest := ways[shown:]:
        yield f"others in {sum(count for _, count in rest)}"
    if deeper := len(plan.schedule.deeper & plan.schedule.explicit_recompute):
        yield Detail(f"{deeper} of {plan.schedule.stages * plan.schedule.micro_batches} forwards recompute more")


def offload_words(plan: Plan, why: Explanation) -> Iterator[str]:
    """Phrases on offloaded activations and optimizer states, and on the host memory that they take."""
    if moved := sum(op.kind is Kind.O for op in plan.schedule.operations):
        yield f"{moved} of {plan.schedule.stages * plan.schedule.micro_batches} activations"
        if plan.target is not None and (release := targets[plan.target].offload_release):
            yield f"needs {release} (--swap none plans without)"
    if stepped := len(plan.schedule.host_steps):
        all_ = stepped == plan.schedule.stages
        yield "CPU optimizer" if all_ else f"CPU optimizer for {stepped} of {plan.schedule.stages} stages"
    if plan.options.host_optimizer:
        yield f"CPU optimizer for {plan.options.host_optimizer:.0%} of the states"
    if any(why.host_memory):
        largest, total = max(why.host_memory), sum(why.host_memory) * plan.ranks / plan.devices
        limit = why.units.host_memory
        there = "" if limit is None else f", of {size_words(limit)}{' assumed' * is_assumed(why)}"
        device = why.cluster.device_word
        fullest = why.host_memory.index(largest)
        activations = why.host_activations[fullest]
        yield f"{size_words(largest)} of host memory per {device}{there}"
        if 0 < activations < largest:
            yield Detail(f"{size_words(activations)} of it activations")
        if total > largest:
            yield Detail(f"{size_words(total)} in all")


def is_assumed(why: Explanation) -> bool:
    """Tell whether host memory is not given by the cluster and a usual server's is assumed."""
    return not why.cluster.gives("host_memory")


def host_is_full(why: Explanation) -> bool:
    """Tell whether a plan takes nearly all of the host memory that the cluster gives."""
    limit = why.units.host_memory
    if limit is None or is_assumed(why):
        return False
    return max(why.host_memory, default=0.0) > FULL_HOST_SHARE * float(limit)


def lever_words(plan: Plan, why: Explanation) -> Iterator[str]:
    """Three phrases: the plan's recomputation, its offload, and the frameworks that run it."""
    recomputed, moved = ", ".join(recomputation_words(plan)), ", ".join(offload_words(plan, why))
    yield f"recomputing {recomputed}" if recomputed else "no recomputation"
    yield f"offload {moved}" if moved else "no offload"
    yield f"runs in {', '.join(plan_runs_in(plan)) or 'no framework'}"
