"""What a plan does beyond its degrees, in phrases: recomputation, offload, and the hosts' memory that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from debubble.formatting import size_words
from debubble.ir import Kind
from debubble.planners.analysis.explanation import Explanation
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.plans import Plan
from debubble.targets.target import targets

STRATEGIES_SHOWN = 2
"""Ways to recompute that are named; the others, if they are several, are counted together."""
FULL_HOST_SHARE = 0.95
"""Share of a host's memory above which nothing is certain to fit."""


def unit_words(plan: Plan) -> str:
    """The word for the units of the partition: half-layers, or layers."""
    return "half-layers" if any(unit.type == "mlp" for stage in plan.partition for unit in stage) else "layers"


def recomputation_words(plan: Plan) -> Iterator[str]:
    """The strategies of the units that recompute."""
    strategies = Counter(unit.strategy for stage in plan.partition for unit in stage if unit.layer is not None)
    total = sum(strategies.values())
    ways = [(name, count) for name, count in strategies.most_common() if name != "none"]
    shown = len(ways) if len(ways) == STRATEGIES_SHOWN + 1 else STRATEGIES_SHOWN
    for n, (name, count) in enumerate(ways[:shown]):
        yield f"{name} in {count}{f' of {total} {unit_words(plan)}' if n == 0 else ''}"
    if others := ways[shown:]:
        yield f"other ways in {sum(count for _, count in others)}"
    if deeper := len(plan.schedule.deeper & plan.schedule.explicit_recompute):
        yield f"{deeper} of {plan.schedule.stages * plan.schedule.micro_batches} forwards recompute more"


def offload_words(plan: Plan, why: Explanation) -> Iterator[str]:
    """The activations and optimizer states that go to the host, and its memory that they take."""
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
        most, total = max(why.host_memory), sum(why.host_memory) * plan.ranks / plan.devices
        limit = why.units.host_memory
        there = "" if limit is None else f" of {size_words(limit)}"
        device = why.cluster.device_word
        fullest = why.host_memory.index(most)
        kept = why.host_activations[fullest]
        yield f"{size_words(most)}{there} of host memory per {device}"
        if 0 < kept < most:
            yield f"{size_words(kept)} of it activations"
        yield f"{size_words(total)} on all hosts"


def is_assumed(why: Explanation) -> bool:
    """Tell whether the hosts' memory is a usual server's, less what the system needs."""
    return not why.cluster.gives("host_memory")


def host_is_full(why: Explanation) -> bool:
    """Tell whether a plan takes nearly all of some host's memory that was given, of which the system needs a part."""
    limit = why.units.host_memory
    if limit is None or is_assumed(why):
        return False
    return max(why.host_memory, default=0.0) > FULL_HOST_SHARE * float(limit)


def lever_words(plan: Plan, why: Explanation) -> Iterator[str]:
    """What the plan recomputes and moves to the host, and the frameworks that run it, a phrase each."""
    again, moved = ", ".join(recomputation_words(plan)), ", ".join(offload_words(plan, why))
    yield f"recomputing {again}" if again else "no recomputation"
    yield f"offload {moved}" if moved else "no offload"
    yield f"runs in {', '.join(plan_runs_in(plan)) or 'no framework'}"
