"""The search of degrees: how a model and a global batch are best divided over all devices of a cluster."""

from debubble.planners.degrees.memory import Footprint, footprints, footprints_with
from debubble.planners.degrees.pareto import pareto_front
from debubble.planners.degrees.remedies import Misfit, misfit
from debubble.planners.degrees.search import search_degrees
from debubble.planners.degrees.space import Job, configurations

__all__ = [
    "Footprint",
    "Job",
    "Misfit",
    "configurations",
    "footprints",
    "footprints_with",
    "misfit",
    "pareto_front",
    "search_degrees",
]
