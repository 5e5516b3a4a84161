"""What a checkpoint holds of a Pipeline: parameters and AdamW's moments, by Hugging Face name.

Names are the same under every partition, so a checkpoint can be resumed under another plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from debubble.runtime.distributed.sharding import Piece, local
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
    """Of all parameters on this rank, for the next step."""
    for optimizer in pipeline.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def state_of(pipeline: Pipeline) -> dict[str, Piece]:
    """What this rank has of the run's tensors, live: what is loaded into them is what the pipeline trains on."""
    state: dict[str, Piece] = {}
    optimizer_of = {p: o for o in pipeline.optimizers for group in o.param_groups for p in group["params"]}
    for name, parameter, piece in pipeline.pieces():
        state[f"model.{name}"] = piece
        if parameter in optimizer_of:
            for what, tensor in _moments(optimizer_of[parameter], parameter).items():
                state[f"optimizer.{name}.{what}"] = (
                    piece._replace(tensor=local(tensor)) if tensor.dim() else Piece.whole(tensor)
                )
    return state


def _moments(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of one parameter, made if no step has been taken."""
    if not optimizer.state[parameter]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    state: dict[str, Tensor] = optimizer.state[parameter]
    return state
