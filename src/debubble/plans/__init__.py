"""Plans, and the file that keeps one."""

from debubble.plans.plan import BY_HAND, IMPORTED, ModelOnCluster, Plan
from debubble.plans.simulated import Simulated

__all__ = ["BY_HAND", "IMPORTED", "ModelOnCluster", "Plan", "Simulated"]
