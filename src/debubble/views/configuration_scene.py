"""The scene of one fixed configuration of a model on a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from debubble.costs import Cluster, step_tail
from debubble.ir import RunOptions
from debubble.models import Model
from debubble.planners.analysis.remarks import model_remarks
from debubble.planners.fixed_configuration import fixed_configuration
from debubble.simulator import simulate
from debubble.views.scene import Scene


def configuration_scene(
    model: Model, cluster: Cluster, run: RunOptions, *, pipeline: int | None = None, **configuration: Any
) -> Scene:
    """Simulate a named schedule on even stages, with what comes after the pipeline.

    Args:
        model: The model.
        cluster: Its devices.
        run: The options of the run.
        pipeline: Pipeline devices; None: all that the other degrees leave.
        configuration: Further arguments of `fixed_configuration`.

    Raises:
        InputError: For what does not go together.
        OutOfMemoryError: If it does not fit.
    """
    schedule, costs = fixed_configuration(model, cluster, pipeline=pipeline, **configuration, **asdict(run))
    timeline = simulate(schedule, costs)
    return Scene.of(
        timeline, title=schedule.name, seconds=True, post_validation=run.post_validation,
        tail=step_tail(model, cluster, run, pipeline=pipeline, schedule=schedule),
        remarks=model_remarks(timeline, run, model=model, cluster=cluster),
    )  # fmt: skip
