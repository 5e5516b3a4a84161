"""`debubble profile` on this device, and every operator separately, compared with computed costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from debubble.costs import MEGATRON, Cluster, load_profile, model_units
from debubble.costs.analytical.half_layers import attention, mlp
from debubble.costs.analytical.operators import Shapes
from debubble.costs.devices.speed import Speed, element_bytes
from debubble.costs.units import Units
from debubble.ir import PlannedUnit, RunOptions
from debubble.models import Model
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, lanes_of
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.units import MicroBatch, UnitModule
from on_gpu.figures import Figures, pair
from on_gpu.machine import compared_hardware, seconds_of
from on_gpu.settings import Config, Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NAMES = {"mlp": "projections", "rotary": "projections"}
"""Operators of the costs that are part of another one in the runtime."""
RUNTIME = replace(MEGATRON, whole_layers=False)
"""debubble's runtime keeps the input of either half of a layer that is recomputed in full."""


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    for name, config, length in cases(settings):
        figures.run(partial(units, config, length, settings, figures, name), name, needs=20)
        figures.measure(partial(operators, config, length, settings), name, "operators", needs=10)


def cases(settings: Settings) -> list[tuple[str, Config, int]]:
    dense = [(f"dense-{length}", settings.dense, length) for length in dict.fromkeys(settings.lengths)]
    return [*dense, (f"mixture-{settings.lengths[0]}", settings.mixture, settings.lengths[0])]


def units(config: Config, length: int, settings: Settings, figures: Figures, name: str) -> None:
    """Measurement by the command, and each kind of unit with its computed costs."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "config.json", Path(folder) / "profile.json"
        source.write_text(json.dumps(config))
        command = [
            sys.executable, "-m", "debubble", "profile", str(source), "-o", str(output), "--device", settings.device,
            "--processes", "1", "--dtype", settings.dtype, "--sequence-length", str(length),
            "--repetitions", str(settings.repetitions),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=max(figures.remaining_seconds, 1), env=os.environ)
        measured = load_profile(output)
        figures.add(name, "profile", figures=json.loads(output.read_text()))
    options = RunOptions(dtype=settings.dtype, sequence_length=length)
    computed = model_units(
        Model.from_hf(config), Cluster.parse(f"1x{compared_hardware(settings).name}"), options, framework=RUNTIME
    )
    figures.add(name, "units", figures=alongside(computed, measured))
    predicted = computed.offload_bandwidth or 0
    figures.add(name, "offload_bandwidth", figures=pair(predicted, measured.offload_bandwidth or 0))


def alongside(computed: Units, measured: Units) -> dict[str, Any]:
    """Predicted and measured seconds and bytes by type of unit."""
    results: dict[str, Any] = {}
    for one, other in zip(computed.units, measured.units, strict=True):
        if one.type in results:
            continue
        strategies = one.strategies.keys() & other.strategies.keys()
        results[one.type] = {
            "forward": pair(one.forward, other.forward),
            "backward": pair(one.backward_input + one.backward_weight, other.backward_input + other.backward_weight),
            "backward_weight": pair(one.backward_weight, other.backward_weight),
            "activation": pair(one.activation, other.activation),
            "strategies": {
                name: {
                    "kept": pair(one.strategies[name].activation, other.strategies[name].activation),
                    "recompute": pair(one.strategies[name].recompute, other.strategies[name].recompute),
                }
                for name in sorted(strategies - {"none"})
            },
        }  # fmt: skip
    return results


def operators(config: Config, length: int, settings: Settings) -> dict[str, Any]:
    """Predicted and measured forward and backward of every operator, by half of a layer."""
    lanes = lanes_of(torch.device(settings.device))
    options = RunOptions(dtype=settings.dtype, sequence_length=length)
    speed = Speed(compared_hardware(settings), element_bytes(settings.dtype))
    shapes = Shapes(model=Model.from_hf(config), options=options, framework=RUNTIME, speed=speed)
    results = {}
    for kind, costs in (("attention", attention), ("mlp", mlp)):
        (unit,) = build_stage(config, [PlannedUnit(kind, 0)], dtype=DTYPES[settings.dtype])
        predicted: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for operator in costs(shapes, 0):
            total = predicted[NAMES.get(operator.name, operator.name)]
            total[0] += operator.forward
            total[1] += operator.backward_input + operator.backward_weight
        measured = timed(unit.to(lanes.device), length, config["hidden_size"], lanes, settings)
        results[kind] = {
            name: {
                "forward": pair(predicted[name][0], measured.get(name, (0, 0))[0]),
                "backward": pair(predicted[name][1], measured.get(name, (0, 0))[1]),
            }
            for name in dict.fromkeys([*measured, *predicted])
            if any(predicted[name]) or name in measured
        }  # fmt: skip
    return results


def timed(
    unit: UnitModule, length: int, hidden: int, lanes: CpuLanes | CudaLanes, settings: Settings
) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward of every operator that a unit calls, by name."""
    calls: list[tuple[str, Any, tuple[torch.Tensor, ...]]] = []

    def note(name: str, function: Any, *inputs: torch.Tensor) -> Any:
        calls.append((name, function, tuple(t.detach() for t in inputs)))
        return function(*inputs)

    x = torch.randn(1, length, hidden, device=lanes.device, dtype=DTYPES[settings.dtype])
    with torch.no_grad():
        unit(x, MicroBatch(), note)
    results: dict[str, tuple[float, float]] = {}
    for name, function, inputs in calls:
        forward, backward = both(function, inputs, lanes, settings)
        before = results.get(name, (0.0, 0.0))
        results[name] = before[0] + forward, before[1] + backward
    return results


def both(
    function: Any, inputs: tuple[torch.Tensor, ...], lanes: CpuLanes | CudaLanes, settings: Settings
) -> tuple[float, float]:
    """Seconds of one operator's forward, and of the backward of its differentiable results."""
    operands = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    forward = seconds_of(lanes, lambda: function(*operands), repetitions=settings.repetitions)
    results = function(*operands)
    flat = [results] if isinstance(results, torch.Tensor) else list(results)
    ends = [y for y in flat if y.requires_grad]
    gradients = [torch.randn_like(y) for y in ends]
    if not ends:
        return forward, 0.0
    backward = seconds_of(
        lanes, lambda: torch.autograd.backward(ends, gradients, retain_graph=True), repetitions=settings.repetitions
    )
    return forward, backward
