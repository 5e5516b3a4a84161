"""Quick estimates of a step with ChronosPipe's parts, by which the search of degrees ranks choices that use hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from debubble.papers.chronospipe.combinations import CombinationBuilder
from debubble.papers.chronospipe.planner import ChronosSearch
from debubble.planners.degrees.host_estimates import HostEstimate, host_estimates
from debubble.planners.problem import Problem

MAX_TRIALS = 12
"""Number of combinations that a quick plan tries; it is the first of them that fits."""


def promise(problem: Problem) -> float:
    """Seconds that a step may take with the combination that promises most; infinite if nothing seems to fit."""
    builder = CombinationBuilder.of(problem)
    return builder.promise(builder.combinations()[0])


def quick_step(problem: Problem, spend: Callable[[float], None]) -> float:
    """Seconds of a step of the first combination that fits, of those that promise most.

    `spend` is told the seconds of the reference machine that it takes.  Raises InfeasibleError if none fits.
    """
    promising = CombinationBuilder.of(problem).combinations()[:MAX_TRIALS]
    search = ChronosSearch(replace(problem, effort=0.0), promising)
    try:
        return search.expected()
    finally:
        spend(search.effort.spent)


host_estimates.add("chronos", HostEstimate(promise=promise, quick_step=quick_step))
