"""Steps of the same modules by debubble and by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from even_plan import even_plan
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import debubble as db
from debubble.ir import PlannedUnit, RunOptions, Schedule

Step = Callable[[], Any]
Loss = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A Llama layer without positions, in plain torch."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [rows, length, hidden] to the same shape."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        core = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(core.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        mlp: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + mlp


def loss_of(count: int) -> Loss:
    """Loss of a micro-batch as its share of the mean over this many tokens."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / count

    return loss


def torchs(kind: str, modules: Mapping[int, nn.Module], stages: int, micro_batches: int, tokens: Tensor) -> Step:
    """A step by a torch schedule, with this rank's modules by stage; returns the loss on the last rank."""
    local = [PipelineStage(module, stage, stages, tokens.device) for stage, module in modules.items()]
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    schedule = get_schedule_class(kind)(
        local[0] if len(local) == 1 else local, micro_batches, loss_fn=loss_of(targets.numel()), scale_grads=False
    )

    def step() -> Tensor | None:
        for module in modules.values():
            module.zero_grad()
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target": targets, "losses": losses} if stages - 1 in modules else {}
        schedule.step(*([inputs] if 0 in modules else []), **last)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    return step


def debubbles(schedule: Schedule, stages: Sequence[nn.Module], tokens: Tensor, **options: Any) -> Step:
    """A step by debubble, with the modules of all stages; returns the loss."""
    dtype = options.pop("dtype", "fp32")
    units = [PlannedUnit("module", stage) for stage in range(schedule.stages)]
    plan = even_plan(schedule, units, RunOptions(dtype=dtype, sequence_length=tokens.shape[1] - 1))
    pipeline = db.Pipeline(nn.Sequential(*stages), plan, **options)

    def step() -> Tensor:
        for parameter in pipeline.parameters():
            parameter.grad = None
        return pipeline.step(tokens)

    return step
