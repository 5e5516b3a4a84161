"""Tokens from the logits of a pipeline's forwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from debubble.ir import Kind, Plan
from debubble.models.config import ModelConfig
from debubble.runtime.distributed.cuts import Cut
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.models.stage import Stage
from debubble.runtime.operators import widen


def chosen_tokens(logits: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    """A token for each row of logits [rows, vocabulary]: the likeliest at temperature 0, else a sample."""
    if not temperature:
        return logits.argmax(-1)
    return torch.multinomial((widen(logits) / temperature).softmax(-1), 1, generator=random)[:, 0]


@contextmanager
def last_logits(
    plan: Plan, stages: Mapping[int, Stage], device: int, group: TensorGroup
) -> Iterator[dict[int, Tensor]]:
    """Let the last unit, in place of its loss, leave the last position's logits [rows, vocabulary] by micro-batch.

    They stay empty where the last stage is not.
    """
    logits_of: dict[int, Tensor] = {}
    last = plan.schedule.stages - 1
    if last not in stages:
        yield logits_of
        return
    unit = stages[last].units[-1]
    forwards = (op for op in plan.schedule.orders[device] if op.kind is Kind.F and op.stage == last)
    order = itertools.cycle([op.micro_batch for op in forwards])
    cut = Cut(1, ModelConfig.from_hf(plan.model or {}).vocab)

    def keep(logits: Tensor, targets: Tensor) -> Tensor:
        own = logits[:, -1]
        logits_of[next(order)] = own if group.size == 1 else group.gather(own, cut)
        return logits.new_zeros(())

    loss, unit.loss = unit.loss, keep
    try:
        yield logits_of
    finally:
        unit.loss = loss
