"""Registry of quick estimates of a step with optimizer states and activations on hosts, by the planner's name.

Module `estimate` in a paper's folder (`debubble.papers`) registers the estimate that its method makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from debubble.planners.problem import Problem
from debubble.registry import PAPERS, Registry


@dataclass(frozen=True, kw_only=True)
class HostEstimate:
    """A planner's estimate of a step with hosts.

    Attributes:
        promise: Seconds that a step may take; infinite if nothing seems to fit.
        quick_step: Seconds of a step of a quick plan; the second argument is called with the effort spent.  Raises
            InfeasibleError if nothing fits.
    """

    promise: Callable[[Problem], float]
    quick_step: Callable[[Problem, Callable[[float], None]], float]


host_estimates: Registry[HostEstimate] = Registry(
    "debubble.planners.degrees", what="estimate", folders=(PAPERS, "estimate")
)
