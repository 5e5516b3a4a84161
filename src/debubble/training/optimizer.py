"""The optimizer of `debubble train`, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from debubble.runtime.pipeline import Pipeline


def adamw(*, weight_decay: float) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Makes the optimizer of some parameters; its learning rate is set every step.  Only matrices decay."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return AdamW([g for g in groups if g["params"]], weight_decay=weight_decay, betas=(0.9, 0.95), fused=True)

    return make


def set_learning_rate(pipeline: Pipeline, rate: float) -> None:
    """Set the learning rate of all parameters on this rank, for the next step."""
    for optimizer in pipeline.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, floor: float = 0.1) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then a cosine down to `floor` x peak at the last of `steps`.

    Steps count from 0.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
