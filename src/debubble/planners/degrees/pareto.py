"""The Pareto front of step and memory, from quick plans under successively smaller memory limits."""

from __future__ import annotations

from dataclasses import replace

from debubble.costs import Cluster
from debubble.ir import DebubbleError
from debubble.ir.degrees import ConfigurationSummary
from debubble.planners.degrees.search import quickest
from debubble.planners.degrees.space import Job

MAX_POINTS = 6
"""Number of points on the front, the given plan included."""
MEMORY_FACTOR = 0.8
"""Memory limit of the next point, as a fraction of the memory of the last."""
POINT_EFFORT_SHARE = 0.1
"""Fraction of the job's effort for one point."""


def pareto_front(job: Job, best: ConfigurationSummary) -> tuple[ConfigurationSummary, ...]:
    """Plans of which none is both slower and larger than another, fastest first, beginning with `best`.

    Every further point is the fastest quick plan of all choices of degrees within 80% of the last point's memory.
    """
    point, front = best, [best]
    for _ in range(MAX_POINTS - 1):
        cluster = _with_limit(job.cluster, MEMORY_FACTOR * point.peak_memory)
        smaller = replace(job, cluster=cluster, effort=POINT_EFFORT_SHARE * job.effort)
        try:
            point = quickest(smaller).search.configurations[0]
        except DebubbleError:
            break
        front = [faster for faster in front if faster.step_time < point.step_time] + [point]
    return tuple(front)


def _with_limit(cluster: Cluster, memory: float) -> Cluster:
    """The cluster with memory limits of at most this many bytes."""
    limits = [min(limit, int(memory)) for limit in cluster.memory_limits]
    return Cluster.from_dict({**cluster.to_dict(), "memory_limit": limits})
