"""State of a Pipeline in a checkpoint: parameters and AdamW's moments, by Hugging Face name.

Names are the same under every partition, so a checkpoint can be resumed under another plan.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.runtime.distributed.sharding import TensorShard, local_tensor
from debubble.runtime.pipeline import Pipeline


def state_of(pipeline: Pipeline) -> dict[str, TensorShard]:
    """This rank's shards of the run's tensors, live: the pipeline trains on what is loaded into them."""
    state: dict[str, TensorShard] = {}
    optimizer_of = {p: o for o in pipeline.optimizers for group in o.param_groups for p in group["params"]}
    for name, parameter, piece in pipeline.shards():
        state[f"model.{name}"] = piece
        if parameter in optimizer_of:
            for what, tensor in _moments(optimizer_of[parameter], parameter).items():
                state[f"optimizer.{name}.{what}"] = (
                    piece._replace(tensor=local_tensor(tensor)) if tensor.dim() else TensorShard.whole(tensor)
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
