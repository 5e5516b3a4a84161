"""An exported plan is imported with the same step and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.exports import exports
from debubble.imports import imports
from debubble.imports.job import ImportedJob
from debubble.imports.registry import UserFacts
from debubble.models import Model
from debubble.plans import Plan

JOBS: dict[str, dict[str, Any]] = {
    "whole": {"memory_limit": "30GiB", "planner": "merak"},
    "balanced": {"memory_limit": "30GiB", "planner": "adapipe"},
    "chunks": {"planner": "portfolio", "effort": 0.1},
    "replicas": {"data": 2, "zero": 1, "micro_batch_size": 2, "planner": "adapipe"},
    "tensor": {"tensor": 2, "data": 2, "zero": 1, "planner": "adapipe"},
    "sharded": {"data": 2, "zero": 2, "planner": "adapipe"},
    "whole parameters": {"data": 2, "zero": 3, "planner": "adapipe"},
    "hosts": {"data": 2, "zero": 1, "host_optimizer": 0.5, "planner": "adapipe"},
    "combined": {
        "data": 2, "zero": 1, "expert": 2, "expert_overlap": True, "chunks": 2, "planner": "portfolio", "effort": 0.1
    },
    "modules": {"sequence_length": 8192, "data": 4, "zero": 1, "expert": 4, "planner": "portfolio", "effort": 0.3},
    "experts": {"tensor": 2, "data": 2, "zero": 1, "expert": 4, "expert_tensor": 1, "planner": "adapipe"},
    "FSDP": {"pipeline": 1, "data": 4, "zero": 3, "micro_batch_size": 2, "planner": "adapipe"},
    "gathered once": {"pipeline": 1, "data": 4, "zero": 2, "memory_limit": "80GiB", "planner": "adapipe"},
}  # fmt: skip
ACCUMULATING = ("torchtitan", "automodel", "deepspeed", "megatron", "primus")
"""Targets that shard more than optimizer states if there is no pipeline."""


def planned(target: str, job: str) -> Plan:
    options = JOBS[job]
    ranks = options.get("data", 1) * options.get("tensor", 1)
    devices = options.get("pipeline", 4) * ranks
    cluster = db.Cluster.parse(f"{devices}x{'H100-80GB' if job == 'modules' else 'H200'}")
    model = db.models["qwen3-30b-a3b" if "expert" in options else "qwen3-8b" if ranks > 1 else "llama3.2-3b"]
    untied = Model.from_hf({**model.config, "tie_word_embeddings": False})
    options = {"micro_batches": 8, "sequence_length": 4096, **options}
    return db.plan(untied, cluster, target=target, **options)


def read(plan: Plan, target: str, folder: Path) -> ImportedJob:
    for name, content in exports[target](plan).files.items():
        (folder / name).write_text(content)
    importer = imports[target]
    file = folder / importer.file
    assert plan.model_on_cluster is not None
    model, cluster = plan.model_on_cluster
    facts = UserFacts(cluster=cluster, model=model, sequence_length=plan.options.sequence_length)
    return importer.job(importer.settings(file), file, facts)


COMMON_JOBS = ("whole", "balanced", "chunks", "replicas", "tensor")
"""Jobs that all targets run, except for those below."""

UNSAID = {
    ("torch", 4): (
        "What is recomputed is your model's: predicted is that nothing is.",
        "Micro-batches are taken for one sequence, optimizer and dtype for adamw and bf16, and replicas for ZeRO-1.",
    ),
    ("deepspeed", 1): (
        "Recomputation is your script's: predicted is none; if it checkpoints layers, give --recompute full.",
    ),
}
"""Sentences on what a target's files do not say, by its number of pipeline devices."""

PAIRS = [
    (target, job)
    for target in imports
    for job in JOBS
    # DeepSpeed has no tensor parallelism, a CSV says neither what is recomputed nor of how many sequences, and only
    # Megatron's arguments say all of the others, torch's hosts where whole experts are.
    if (target, job) != ("deepspeed", "tensor")
    and (target != "torch" or job == "chunks")
    and (
        job in (*COMMON_JOBS, "FSDP", "gathered once")
        or target in ("megatron", "primus")
        or (job == "experts" and target in ("torchtitan", "automodel"))
    )
    and (JOBS[job].get("pipeline") != 1 or target in ACCUMULATING)
]


FAST = {
    ("megatron", "whole"), ("primus", "experts"), ("torchtitan", "FSDP"), ("automodel", "balanced"),
    ("deepspeed", "gathered once"), ("torch", "chunks"), ("mindformers", "tensor"), ("megatron", "hosts"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "name"), [pytest.param(*pair, marks=[] if pair in FAST else pytest.mark.slow) for pair in PAIRS]
)
def test_an_exported_plan_is_read_back(target: str, name: str, tmp_path: Path) -> None:
    plan = planned(target, name)

    job = read(plan, target, tmp_path)
    assert plan.cluster is not None
    imported = job.plan(plan.cluster)

    unread = [line for line in job.unread if not line.startswith("Known to cost neither time nor memory: ")]
    assert unread == list(UNSAID.get((target, plan.devices), ()))
    assert job.rest.warnings == ()
    assert imported.options == plan.options
    assert imported.degrees == plan.degrees
    assert [len(stage) for stage in imported.partition] == [len(stage) for stage in plan.partition]
    before, after = plan.simulate(), imported.simulate()
    assert float(after.makespan) == pytest.approx(float(before.makespan), rel=1e-12)
    assert list(map(float, after.peak_memory)) == pytest.approx(list(map(float, before.peak_memory)), rel=1e-12)


def test_every_target_with_an_exporter_is_read() -> None:
    assert set(imports) == set(exports)
