"""Plans, and the file that keeps one."""

from debubble.plans.plan import ModelOnCluster, Plan
from debubble.plans.simulated import Simulated

__all__ = ["ModelOnCluster", "Plan", "Simulated"]
