"""Headlines of plans: the model and the cluster that each is for."""

from __future__ import annotations

from debubble.costs import Cluster
from debubble.ir import Plan
from debubble.models import Model, models


def subject(plan: Plan) -> str:
    """The model and its cluster."""
    if plan.model is None or plan.cluster is None:
        return f"Given costs on {plan.devices} devices"
    return model_title(Model.from_hf(plan.model), Cluster.from_dict(plan.cluster))


def model_title(model: Model, cluster: Cluster) -> str:
    """The name by which a model is known, or its family and size, and the devices."""
    known = (name for name, other in models.items() if other.config == model.config)
    name = next(known, f"{model.family}, {model.parameters / 1e9:.1f} B parameters")
    return f"{name} on {cluster.file['devices'].replace('x', ' x ', 1)}"
