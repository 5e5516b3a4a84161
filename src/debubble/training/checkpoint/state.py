"""State of a Pipeline in a checkpoint: parameters and their optimizers' states, by Hugging Face name.

Names are the same under every partition, so a checkpoint can be resumed under another plan.  States that have their
parameter's shape are resumed under another division, too; those in a form of their own, such as codes of 8 bits and
their scales, belong to the part of the parameter that a rank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from debubble.runtime.distributed.sharding import TensorShard, inner_tensors, local_tensor
from debubble.runtime.parameters.optimizers import parameters_of
from debubble.runtime.pipeline import Pipeline
from debubble.training.checkpoint.dcp_planners import OF_A_PART

AVERAGE = "average."
"""Prefix of the entries with moving averages of parameters."""


def state_of(pipeline: Pipeline) -> dict[str, TensorShard]:
    """This rank's shards of the run's tensors, live: the pipeline trains on what is loaded into them.

    Numbers that an optimizer keeps as Python's own are copies: see `take_numbers`.
    """
    state: dict[str, TensorShard] = {}
    optimizer_of = {p: optimizer for optimizer in pipeline.optimizers for p in parameters_of(optimizer)}
    for optimizer in pipeline.optimizers:
        make_states(optimizer)
    if pipeline.averages is not None:
        pipeline.averages.begin()
    for name, parameter, piece in pipeline.shards():
        state[f"model.{name}"] = piece
        average = None if pipeline.averages is None else pipeline.averages.of(parameter)
        if average is not None:
            state[AVERAGE + name] = piece._replace(tensor=average)
        if parameter in optimizer_of:
            for what, value in optimizer_of[parameter].state[parameter].items():
                state.update(_entries(f"optimizer.{name}.{what}", value, piece))
    return state


def take_numbers(pipeline: Pipeline, state: dict[str, TensorShard]) -> None:
    """Give the optimizers the numbers that were loaded into `state`, where they keep Python's own."""
    optimizer_of = {p: optimizer for optimizer in pipeline.optimizers for p in parameters_of(optimizer)}
    for name, parameter, _ in pipeline.shards():
        states = optimizer_of[parameter].state[parameter] if parameter in optimizer_of else {}
        for what, value in states.items():
            if isinstance(value, int | float):
                states[what] = type(value)(state[f"optimizer.{name}.{what}"].tensor.item())


def make_states(optimizer: Optimizer) -> None:
    """Let an optimizer make the states of parameters that it has never stepped, by steps that change nothing."""
    parameters = [p for p in parameters_of(optimizer) if p not in optimizer.state]
    if not parameters:
        return
    gradients = {p: p.grad for p in parameters_of(optimizer)}
    for parameter in gradients:
        parameter.grad = None
    for parameter in parameters:  # one by one, so that there is one copy at a time
        before = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
        parameter.detach().copy_(before)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _entries(name: str, value: Any, piece: TensorShard) -> Iterator[tuple[str, TensorShard]]:
    """One of an optimizer's states of a part of a parameter, as the tensors that a checkpoint has of it."""
    if isinstance(value, int | float):
        yield name, TensorShard.whole(torch.tensor(value, dtype=torch.float64))
    elif isinstance(value, Tensor):
        tensor = local_tensor(value)
        inner = inner_tensors(tensor)
        if not tensor.dim():
            yield name, TensorShard.whole(tensor)
        elif not inner and tensor.shape == piece.tensor.shape:
            yield name, piece._replace(tensor=tensor)
        elif piece.blocks:
            place = " ".join(f"{block.offsets}+{block.size}" for block in piece.blocks)
            for number, part in enumerate(inner or [tensor]):
                yield f"{name}.{number}{OF_A_PART}{place}", TensorShard.whole(part)
