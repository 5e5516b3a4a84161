"""The Pareto front of step and memory: plans under less and less memory."""

from __future__ import annotations

from dataclasses import replace

from debubble.costs import Cluster
from debubble.ir import DebubbleError
from debubble.ir.degrees import ConfigurationSummary
from debubble.planners.degrees.search import quickest
from debubble.planners.degrees.space import Job

POINTS = 6
"""Points that are looked for, the first plan's among them."""
LESS = 0.8
"""The memory of a point's successor, as a share of its own."""
SHARE = 0.1
"""The part of the effort for each point."""


def pareto_front(job: Job, best: ConfigurationSummary) -> tuple[ConfigurationSummary, ...]:
    """Plans none of which is both slower and larger than another one, fastest first, from the fastest known on.

    Each is the quickest quick plan of all choices of degrees that stays within 80% of the memory of the one before.
    """
    found, front = best, [best]
    for _ in range(POINTS - 1):
        smaller = replace(job, cluster=_with_limit(job.cluster, LESS * found.peak_memory), effort=SHARE * job.effort)
        try:
            found = quickest(smaller).search.configurations[0]
        except DebubbleError:
            break
        front = [point for point in front if point.step_time < found.step_time] + [found]
    return tuple(front)


def _with_limit(cluster: Cluster, memory: float) -> Cluster:
    """The cluster where a plan may use so many bytes of a device, and no more than it may now."""
    limits = [min(limit, int(memory)) for limit in cluster.memory_limits]
    return Cluster.from_dict({**cluster.to_dict(), "memory_limit": limits})
