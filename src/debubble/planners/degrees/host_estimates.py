"""Estimates of steps for which hosts step optimizers and hold activations, by the name of the planner that makes them.

The method is a paper's, so its folder registers it here: module `estimate` in `debubble.papers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from debubble.planners.problem import Problem
from debubble.registry import Registry


@dataclass(frozen=True, kw_only=True)
class HostEstimate:
    """How a planner estimates a step with hosts.

    Attributes:
        promise: Seconds that a step may take; infinite if nothing seems to fit.
        quick_step: Seconds of a step of a quick plan; its second argument is told the effort that this takes.  Raises
            InfeasibleError if nothing fits.
    """

    promise: Callable[[Problem], float]
    quick_step: Callable[[Problem, Callable[[float], None]], float]


host_estimates: Registry[HostEstimate] = Registry("debubble.planners.degrees", what="estimate", in_papers="estimate")
