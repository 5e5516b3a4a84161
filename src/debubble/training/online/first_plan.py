"""Initial plan of an online run without a plan file: minimal memory, because nothing is measured yet."""

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

RECOMPUTING_PLANNER, FALLBACK_PLANNER = "dapple+", "auto"
"""Planners: 1F1B with full recomputation on an even partition, and the one that is used if that does not fit."""


def least_memory_plan(
    model: Model, cluster: Cluster, *, micro_batches: int, memory_limit: str | None = None, **options: Any
) -> Plan:
    """1F1B with full recomputation, one stage per device; if that does not fit, the plan of `auto`.

    Args:
        model: The model.
        cluster: The devices, all of one pipeline.
        micro_batches: Micro-batches per step.
        memory_limit: Bytes per device, or a text such as `20GiB`; None: the cluster's.
        options: Fields of RunOptions.

    Raises:
        InputError: If the arguments are inconsistent.
        InfeasibleError: If nothing fits.
    """
    arguments: dict[str, Any] = {"micro_batches": micro_batches, "memory_limit": memory_limit, "chunks": 1, **options}
    try:
        return plan(model, cluster, planner=RECOMPUTING_PLANNER, **arguments)
    except InfeasibleError:
        return plan(model, cluster, planner=FALLBACK_PLANNER, **arguments)


def save_first(plan: Plan, folder: Path | None) -> Path:
    """Write the plan file to the checkpoint folder, or to the user's cache, named by a hash of model and run."""
    assert plan.model_on_cluster is not None
    model, cluster = plan.model_on_cluster
    run = [dict(model.config), cluster.to_dict(), vars(plan.options), plan.micro_batches]
    name = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:12]
    file = (folder or user_cache("plans")) / f"first-{name}.json"
    plan.save(file)
    return file
