"""The figures of a plan are consistent with each other and between commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.costs.devices.speed import Speed

SEARCHED = ("--tensor", "1", "--context", "1", "--zero", "1", "--micro-batch-size", "1")
PLANS = [
    ("llama3.2-1b", "4xH100", ("--global-batch", "16", "--planner", "adapipe", *SEARCHED)),
    ("llama2-7b", "2xA100-80GB+2xA100-40GB", ("--micro-batches", "3", "--planner", "joint")),
    ("qwen3-1.7b", "4xL40S", ("--global-batch", "12", "--for", "megatron", "--planner", "dapple", *SEARCHED)),
    ("mistral-7b", "4xRTX4090", ("--micro-batches", "4", "--lora", "8", "--optimizer", "sgd", "--planner", "dapple")),
    ("gemma3-1b", "2xL4", ("--micro-batches", "1", "--dtype", "fp16", "--planner", "pipeoffload")),
]
FAST = ("llama3.2-1b", "mistral-7b")


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    [pytest.param(*plan, id=plan[0], marks=[] if plan[0] in FAST else pytest.mark.slow) for plan in PLANS],
)
def test_the_figures_of_a_plan_agree(
    run: Any, tmp_path: Path, name: str, devices: str, options: tuple[str, ...]
) -> None:
    file = str(tmp_path / "plan.json")
    code, out, _ = run("plan", name, "--cluster", devices, *options, "--effort", "0.1", "--json", "-o", file)
    assert code == 0
    answer, plan, cluster = json.loads(out), db.Plan.load(file), db.Cluster.parse(devices)
    degrees, step = answer["degrees"], answer["step_time"]

    ranks = degrees["pipeline"] * degrees["tensor"] * degrees["data"] * degrees["context"]
    assert ranks == cluster.count
    tokens = degrees["data"] * degrees["micro_batch_size"] * degrees["micro_batches"] * plan.options.sequence_length
    assert answer["tokens_per_second"] == pytest.approx(tokens / step)
    assert answer["tokens_per_second_per_device"] == pytest.approx(tokens / step / ranks)
    if not plan.options.lora:
        peak = sum(Speed.from_hardware(hardware, plan.options.dtype).product_peak for hardware in cluster.types)
        worked = _operations(db.models[name], plan.options.sequence_length)
        assert answer["mfu"] == pytest.approx(worked * tokens / step / peak, rel=2e-3)

    assert [sum(parts.values()) for parts in answer["memory"]] == pytest.approx(answer["peak_memory"])
    assert all(
        peak <= (plan.costs.limit_of(device) or 0) for device, peak in enumerate(answer["peak_memory"])
    )  # fmt: skip
    assert sum(cause["seconds"] for cause in answer["why"]) == pytest.approx(step)
    assert answer["lower_bound"] <= step
    steps = [candidate["step_time"] for candidate in answer["candidates"] if candidate["step_time"] is not None]
    assert min(steps) == pytest.approx(step)
    for other in answer.get("configurations", []):
        assert other["step_time"] >= step * (1 - 1e-9)
        assert other["peak_memory"] == pytest.approx(sum(other["memory"].values()))
        assert other["tokens_per_second_per_device"] == pytest.approx(tokens / other["step_time"] / ranks)

    simulated = json.loads(run("simulate", file, "--json")[1])
    shown = json.loads(run("show", file, "--json")[1])
    for figure in ("step_time", "makespan", "span", "peak_memory"):
        assert simulated[figure] == pytest.approx(answer[figure])
    for figure in ("step_time", "peak_memory", "tokens_per_second", "mfu", "degrees", "reserve", "binds"):
        assert shown[figure] == pytest.approx(answer[figure])
    for figure in ("lower_bound", "gap", "accuracy", "quick_advice"):
        assert shown["plan"].get(figure) == answer.get(figure)


def _operations(model: db.Model, length: int) -> float:
    """FLOPs per token: six per multiplied parameter, and twelve per attended key."""
    head = model.vocab * model.hidden if model.tied else 0
    keys = 0.0
    for layer in model.per_layer:
        window = min(layer.window or length, length)
        keys += (window * (window + 1) / 2 + (length - window) * window) / length
    matrices = model.active_parameters - model.embedding_parameters + head
    return 6 * matrices + 12 * keys * model.heads * model.head_dim
