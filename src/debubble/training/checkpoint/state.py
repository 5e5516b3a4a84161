"""State of a Pipeline in a checkpoint: parameters and their optimizers' states, by Hugging Face name.

Names are the same under every partition, so a checkpoint can be resumed under another plan.  States that have their
parameter's shape are resumed under another division, too; those in a form of their own, such as codes of 8 bits and
their scales, belong to the part of the parameter that a rank has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from debubble.runtime.distributed.sharding import TensorShard, inner_tensors, local_tensor
from debubble.runtime.parameters.optimizer_states import copied, parameters_of
from debubble.runtime.pipeline import Pipeline
from debubble.training.checkpoint.dcp_planners import PART_MARK

AVERAGE = "average."
"""Prefix of the entries with moving averages of parameters."""
GROUP_MARK = ".group."
"""Stands between a parameter's name and that of a number of its group."""
GROUP_SETTINGS = frozenset({"params", "lr", "weight_decay"})
"""Entries of groups that the options of a run say, for each group or step its own."""


def state_of(pipeline: Pipeline) -> dict[str, TensorShard]:
    """This rank's shards of the run's tensors, live: the pipeline trains on what is loaded into them.

    Numbers that an optimizer keeps as Python's own, and those of its groups, are copies: see `take_numbers`.
    """
    pipeline.finish_update()
    state: dict[str, TensorShard] = {}
    optimizer_of = {p: optimizer for optimizer in pipeline.optimizers for p in parameters_of(optimizer)}
    group_of = _groups(pipeline)
    for optimizer in pipeline.optimizers:
        make_states(optimizer)
    if pipeline.averages is not None:
        pipeline.averages.begin()
    for name, parameter, piece in pipeline.device_part.shards():
        state[f"model.{name}"] = piece
        average = None if pipeline.averages is None else pipeline.averages.get(parameter)
        if average is not None:
            state[AVERAGE + name] = piece._replace(tensor=average)
        if parameter in optimizer_of:
            for what, value in optimizer_of[parameter].state[parameter].items():
                state.update(_entries(f"optimizer.{name}.{what}", value, piece))
            for what, value in group_numbers(optimizer_of[parameter], group_of[parameter]).items():
                state[f"optimizer.{name}{GROUP_MARK}{what}"] = TensorShard.unsharded(value)
    return state


def group_numbers(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers of a group that its steps have changed, such as the count of steps of schedule-free optimizers.

    The others are settings, which follow from the options of a run.
    """
    numbers = {}
    for what, value in group.items():
        single = isinstance(value, Tensor) and not value.dim()
        if (
            what not in GROUP_SETTINGS
            and (single or isinstance(value, int | float))
            and value != optimizer.defaults.get(what)
        ):
            exact = {bool: torch.bool, int: torch.int64, float: torch.float64}.get(type(value))
            numbers[what] = torch.as_tensor(value, dtype=exact).detach().clone()
    return numbers


def take_numbers(pipeline: Pipeline, state: Mapping[str, TensorShard]) -> None:
    """Give the optimizers the numbers that were loaded into `state`, where they keep Python's own, or in groups."""
    optimizer_of = {p: optimizer for optimizer in pipeline.optimizers for p in parameters_of(optimizer)}
    group_of = _groups(pipeline)
    for name, parameter, _ in pipeline.device_part.shards():
        beginning = f"optimizer.{name}{GROUP_MARK}"
        for entry in [entry for entry in state if entry.startswith(beginning)] if parameter in group_of else ():
            _put(group_of[parameter], entry.removeprefix(beginning), state[entry].tensor)
    for name, parameter, _ in pipeline.device_part.shards():
        states = optimizer_of[parameter].state[parameter] if parameter in optimizer_of else {}
        for what, value in states.items():
            if isinstance(value, int | float):
                states[what] = type(value)(state[f"optimizer.{name}.{what}"].tensor.item())


def _groups(pipeline: Pipeline) -> dict[Tensor, dict[str, Any]]:
    """The group of each parameter in its optimizer."""
    groups = (group for optimizer in pipeline.optimizers for group in optimizer.param_groups)
    return {parameter: group for group in groups for parameter in group["params"]}


def make_states(optimizer: Optimizer) -> None:
    """Let an optimizer make the states of parameters that it has never stepped, by steps that change nothing else."""
    parameters = [p for p in parameters_of(optimizer) if p not in optimizer.state]
    if not parameters:
        return
    gradients = {p: p.grad for p in parameters_of(optimizer)}
    groups = [{what: copied(value) for what, value in group.items()} for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = None
    for parameter in parameters:  # one by one, so that there is one copy at a time
        before = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
        parameter.detach().copy_(before)
        for group, entries in zip(optimizer.param_groups, groups, strict=True):
            for what in group.keys() - entries.keys():
                del group[what]
            for what, value in entries.items():
                _put(group, what, value)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _put(group: dict[str, Any], what: str, value: Any) -> None:
    """Set a group's entry, in place where it is a tensor."""
    if isinstance(group.get(what), Tensor):
        group[what].copy_(value)
    else:
        group[what] = value.item() if isinstance(value, Tensor) else value


def _entries(name: str, value: Any, piece: TensorShard) -> Iterator[tuple[str, TensorShard]]:
    """One of an optimizer's states of a part of a parameter, as the tensors that a checkpoint has of it."""
    if isinstance(value, int | float):
        yield name, TensorShard.unsharded(torch.tensor(value, dtype=torch.float64))
    elif isinstance(value, Tensor):
        tensor = local_tensor(value)
        inner = inner_tensors(tensor)
        if not tensor.dim():
            yield name, TensorShard.unsharded(tensor)
        elif not inner and tensor.shape == piece.tensor.shape:
            yield name, piece._replace(tensor=tensor)
        elif piece.blocks:
            place = " ".join(f"{block.offsets}+{block.size}" for block in piece.blocks)
            for number, part in enumerate(inner or [tensor]):
                yield f"{name}.{number}{PART_MARK}{place}", TensorShard.unsharded(part)
