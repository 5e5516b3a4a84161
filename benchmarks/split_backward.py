"""What the runtime's techniques cost on a Llama block, against plain autograd: the CPU time of one thread.

Every round runs all techniques in shuffled order; the ratio is of the medians over the rounds.  Writes
`benchmarks/results/split_backward.json`.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from provenance import measured_by
from torchs_layers import use_torchs_layers

from debubble.models import ModelConfig
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.recomputation import directly
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.stage import Keeping, Stage
from debubble.runtime.models.units import MicroBatch, UnitModule

HIDDEN, LENGTH, ROUNDS = 512, 256, 25
BLOCK = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


Run = Callable[[torch.Tensor, torch.Tensor], None]
"""Forward and backward of one input, with the gradient of the output."""


def plain(units: list[UnitModule]) -> Run:
    """The same operators with torch's own linear layers, in one graph: no hooks, no segments."""
    use_torchs_layers(units)

    def run(x: torch.Tensor, gradient: torch.Tensor) -> None:
        y = x.detach().requires_grad_()
        for unit in units:
            y = unit(y, MicroBatch(), directly)
        y.backward(gradient)

    return run


def staged(strategy: str, *, split: bool = False, explicit: bool = False) -> Run:
    ledger = Ledger()
    planned = [replace(unit, strategy=strategy) for unit in ModelConfig.from_hf(BLOCK).units[1:-1]]
    units = build_stage(BLOCK, planned)
    ledger.exclude(p for unit in units for p in unit.parameters())
    stage = Stage(units, planned, ledger)

    def run(x: torch.Tensor, gradient: torch.Tensor) -> None:
        stage.forward(0, x, MicroBatch(), Keeping(recomputing=len(units)))
        if explicit:
            stage.recompute(0)
        stage.backward(0, gradient, split=split)
        if split:
            stage.weights(0)

    return run


def main() -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # all multiply by the same library
    techniques = {
        "plain autograd": plain(list(build_stage(BLOCK, ModelConfig.from_hf(BLOCK).units[1:-1]))),
        "whole backward": staged("none"),
        "split backward": staged("none", split=True),
        "selective recompute": staged("norm+activation+multiply"),
        "full recompute, fused": staged("full"),
        "full recompute, explicit, split": staged("full", split=True, explicit=True),
    }
    x, gradient = torch.randn(1, LENGTH, HIDDEN), torch.randn(1, LENGTH, HIDDEN)
    times: dict[str, list[float]] = {name: [] for name in techniques}
    for _ in range(3):
        for run in techniques.values():
            run(x, gradient)
    for _ in range(ROUNDS):
        for name in random.sample(list(techniques), len(techniques)):
            start = time.thread_time()
            techniques[name](x, gradient)
            times[name].append(time.thread_time() - start)
    base = statistics.median(times["plain autograd"])
    figures = {
        name: {"milliseconds": 1e3 * statistics.median(t), "ratio": statistics.median(t) / base, "best": 1e3 * min(t)}
        for name, t in times.items()
    }
    for name, figure in figures.items():
        print(f"{name:32} {figure['milliseconds']:8.1f} ms  x {figure['ratio']:.3f}   (min {figure['best']:.1f})")
    output = Path(__file__).parent.joinpath("results", "split_backward.json")
    output.write_text(json.dumps({**measured_by(), **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
