"""The search of degrees: how a model and a global batch are best divided over all devices of a cluster."""

from debubble.planners.degrees.search import Progress, search_degrees
from debubble.planners.degrees.space import Job, configurations

__all__ = ["Job", "Progress", "configurations", "search_degrees"]
