"""Plans, and the file that keeps one."""

from debubble.plans.plan import Plan
from debubble.plans.simulated import Simulated

__all__ = ["Plan", "Simulated"]
