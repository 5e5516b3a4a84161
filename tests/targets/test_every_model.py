"""Ten models on five clusters, planned for every target: nothing is refused after the fact."""

from __future__ import annotations

import pytest

import debubble as db
from debubble.exports import exports
from debubble.ir import DebubbleError, Plan
from debubble.planners.analysis.nearest import plan_runs_in
from debubble.targets import targets

MODELS = (
    "llama3-8b", "llama2-13b", "llama3-70b", "llama3.2-1b", "qwen3-8b", "qwen2.5-32b", "mistral-7b", "mixtral-8x7b",
    "gpt3-13b", "glm-4.5-air",
)  # fmt: skip
CLUSTERS = ("4xL40S", "8xA100-40GB", "8xH100-80GB", "16xA100-80GB", "64xH100-80GB")


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_target_accepts_its_plan(model: str, cluster: str) -> None:
    def planned(target: str) -> Plan | None:
        try:
            return searched(model, cluster, target)
        except DebubbleError:
            return None

    for name in targets:
        plan = planned(name)
        if plan is None:
            continue
        assert name in plan_runs_in(plan)
        if name in exports:
            assert not [loss for loss in exports[name](plan).losses if "times as long" in loss]


def searched(model: str, cluster: str, target: str) -> Plan:
    """64 sequences on pipelines of eight devices, with ZeRO-1 over what is left; degrees have tests of their own."""
    devices = db.Cluster.parse(cluster)
    pipeline = min(8, devices.count)
    data = devices.count // pipeline
    return db.plan(
        db.models[model], devices, pipeline=pipeline, data=data, zero=int(data > 1), micro_batches=64 // data,
        sequence_length=2048, effort=0.3, planner="adapipe", target=target,
    )  # fmt: skip
