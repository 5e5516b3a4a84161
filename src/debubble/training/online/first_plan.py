"""The plan that an online run begins with where there is none: the least memory, as nothing is measured yet."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from debubble.costs import Cluster
from debubble.files import user_cache
from debubble.ir import InfeasibleError
from debubble.models import Model
from debubble.planners.plan_model import plan
from debubble.plans import Plan

RECOMPUTING, ANY = "dapple+", "auto"
"""The planner of 1F1B that recomputes everything on an even partition, and the one that finds what fits."""


def least_memory_plan(
    model: Model, cluster: Cluster, *, micro_batches: int, memory_limit: str | None = None, **options: Any
) -> Plan:
    """1F1B that recomputes everything, one stage per device; where that does not fit, a plan that does.

    Args:
        model: The model.
        cluster: Its devices, all of one pipeline.
        micro_batches: Micro-batches per step.
        memory_limit: Per device, bytes or a text such as `20GiB`; None: the cluster's.
        options: Those of RunOptions.

    Raises:
        InputError: For what does not go together.
        InfeasibleError: If nothing fits.
    """
    asked: dict[str, Any] = {"micro_batches": micro_batches, "memory_limit": memory_limit, "chunks": 1, **options}
    try:
        return plan(model, cluster, planner=RECOMPUTING, **asked)
    except InfeasibleError:
        return plan(model, cluster, planner=ANY, **asked)


def save_first(plan: Plan, folder: Path | None) -> Path:
    """Write the plan file among a run's checkpoints, or else into this user's cache: one for each model and run."""
    assert plan.model_on_cluster is not None
    model, cluster = plan.model_on_cluster
    run = [dict(model.config), cluster.to_dict(), vars(plan.options), plan.micro_batches]
    name = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]
    file = (folder or user_cache("plans")) / f"first-{name}.json"
    plan.save(file)
    return file
