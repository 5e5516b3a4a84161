"""The share of a step's CPU time that the accounting of saved tensors takes: every one passes a hook and the ledger.

What it takes depends on how many tensors are saved and not on their size.  So it is measured where little else takes
time: steps of one tiny layer with and without it alternate, thousands of times, and the least CPU times of both, which
nothing else on the machine has disturbed, are compared.  The shares are of the least CPU times of layers of real sizes.
Writes `benchmarks/results/saved_tensors.json`.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from provenance import measured_by

from debubble.models import ModelConfig
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.recomputation import Tape
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.stage import Stage
from debubble.runtime.models.units import MicroBatch

TOKENS, PAIRS, ROUNDS, REPETITIONS = 256, 1000, 5, 20
SIZES = (256, 512, 1024)


class Step:
    """Forward and backward of one micro-batch through a layer of a Llama."""

    def __init__(self, hidden: int, tokens: int) -> None:
        config = {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": 11 * hidden // 4,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
        }  # fmt: skip
        planned = ModelConfig.from_hf(config).units[1:-1]
        units = build_stage(config, planned)
        self.ledger = Ledger()
        self.ledger.exclude(p for unit in units for p in unit.parameters())
        self.stage = Stage(units, planned, self.ledger)
        self.x, self.gradient = torch.randn(2, 1, tokens, hidden)

    def seconds(self, *, counted: bool) -> float:
        """CPU seconds of this thread, with or without the accounting."""
        self.ledger.start_step()
        hooks: AbstractContextManager[Any] = nullcontext() if counted else patch.object(Tape, "watch", uncounted)
        with hooks:
            start = time.thread_time()
            self.stage.forward(0, self.x, MicroBatch())
            self.stage.backward(0, self.gradient, split=False)
            return time.thread_time() - start


def uncounted(_: Tape) -> AbstractContextManager[None]:
    """Stand for the context in which a segment's tensors are saved: plain autograd."""
    return nullcontext()


def saved_tensors() -> int:
    """How many tensors a layer saves."""
    step, packed = Step(hidden=16, tokens=1), 0
    pack = Tape._pack

    def counting(tape: Tape, tensor: torch.Tensor) -> Any:
        nonlocal packed
        packed += 1
        return pack(tape, tensor)

    with patch.object(Tape, "_pack", counting):
        step.seconds(counted=True)
    return packed


def accounting() -> list[float]:
    """CPU seconds that the accounting of a layer takes, in each of several rounds."""
    step = Step(hidden=16, tokens=1)
    rounds = []
    for _ in range(ROUNDS):
        pairs = [(step.seconds(counted=True), step.seconds(counted=False)) for _ in range(PAIRS)]
        with_, without = map(min, zip(*pairs, strict=True))
        rounds.append(with_ - without)
    return rounds


def main() -> None:
    """Measure, print and save."""
    torch.set_num_threads(1)
    count, rounds = saved_tensors(), accounting()
    cost = statistics.median(rounds)  # of a layer
    steps = {}
    for hidden in SIZES:
        step = Step(hidden, TOKENS)
        seconds = min(step.seconds(counted=True) for _ in range(REPETITIONS))
        steps[hidden] = {"seconds": seconds, "share": cost / seconds}
    result = {
        **measured_by(), "tokens": TOKENS, "saved_tensors": count,
        "microseconds_per_tensor": 1e6 * cost / count, "rounds": [1e6 * each / count for each in rounds],
        "by_hidden_size": steps,
    }  # fmt: skip
    path = Path(__file__).with_name("results") / "saved_tensors.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
