"""State of a Pipeline in a checkpoint: parameters and optimizer states, by Hugging Face name.

Names do not depend on the partition, so a checkpoint can be resumed under another plan.  States in the shape of their
parameter can also be resharded; others, such as 8-bit codes and their scales, belong to one shard of the parameter and
cannot.
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
"""Separator between a parameter's name and the name of a number of its param group."""
GROUP_SETTINGS = frozenset({"params", "lr", "weight_decay"})
"""Entries of param groups that follow from the run's options and are not saved."""


def state_of(pipeline: Pipeline) -> dict[str, TensorShard]:
    """This rank's shards of the run's live tensors; loading into them changes the pipeline.

    Python numbers in optimizer states and param groups are copies: see `restore_numbers`.
    """
    pipeline.finish_update()
    state: dict[str, TensorShard] = {}
    optimizer_of = {p: optimizer for optimizer in pipeline.optimizers for p in parameters_of(optimizer)}
    group_of = _group_of_parameter(pipeline)
    for optimizer in pipeline.optimizers:
        initialize_states(optimizer)
    if pipeline.averages is not None:
        pipeline.averages.begin()
    for name, parameter, shard in pipeline.device_part.shards():
        state[f"model.{name}"] = shard
        average = None if pipeline.averages is None else pipeline.averages.get(parameter)
        if average is not None:
            state[AVERAGE + name] = shard._replace(tensor=average)
        if parameter in optimizer_of:
            for key, value in optimizer_of[parameter].state[parameter].items():
                state.update(_entries(f"optimizer.{name}.{key}", value, shard))
            for key, value in group_numbers(optimizer_of[parameter], group_of[parameter]).items():
                state[f"optimizer.{name}{GROUP_MARK}{key}"] = TensorShard.unsharded(value)
    return state


def group_numbers(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers of a param group that differ from the optimizer's defaults, such as a schedule-free step count.

    All other entries are settings, which follow from the run's options.
    """
    numbers = {}
    for key, value in group.items():
        single = isinstance(value, Tensor) and not value.dim()
        if (
            key not in GROUP_SETTINGS
            and (single or isinstance(value, int | float))
            and value != optimizer.defaults.get(key)
        ):
            exact = {bool: torch.bool, int: torch.int64, float: torch.float64}.get(type(value))
            numbers[key] = torch.as_tensor(value, dtype=exact).detach().clone()
    return numbers


def restore_numbers(pipeline: Pipeline, state: Mapping[str, TensorShard]) -> None:
    """Copy numbers loaded into `state` back to optimizer states and param groups that hold them as Python numbers."""
    optimizer_of = {p: optimizer for optimizer in pipeline.optimizers for p in parameters_of(optimizer)}
    group_of = _group_of_parameter(pipeline)
    for name, parameter, _ in pipeline.device_part.shards():
        prefix = f"optimizer.{name}{GROUP_MARK}"
        for entry in [entry for entry in state if entry.startswith(prefix)] if parameter in group_of else ():
            _set_entry(group_of[parameter], entry.removeprefix(prefix), state[entry].tensor)
    for name, parameter, _ in pipeline.device_part.shards():
        states = optimizer_of[parameter].state[parameter] if parameter in optimizer_of else {}
        for key, value in states.items():
            if isinstance(value, int | float):
                states[key] = type(value)(state[f"optimizer.{name}.{key}"].tensor.item())


def _group_of_parameter(pipeline: Pipeline) -> dict[Tensor, dict[str, Any]]:
    """Parameter -> its optimizer's param group."""
    groups = (group for optimizer in pipeline.optimizers for group in optimizer.param_groups)
    return {parameter: group for group in groups for parameter in group["params"]}


def initialize_states(optimizer: Optimizer) -> None:
    """Create the states of parameters that an optimizer has never stepped, without changing anything else."""
    parameters = [p for p in parameters_of(optimizer) if p not in optimizer.state]
    if not parameters:
        return
    gradients = {p: p.grad for p in parameters_of(optimizer)}
    groups = [{key: copied(value) for key, value in group.items()} for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = None
    for parameter in parameters:  # one by one, so that only one copy exists at a time
        before = parameter.detach().clone()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        parameter.grad = None
        parameter.detach().copy_(before)
        for group, entries in zip(optimizer.param_groups, groups, strict=True):
            for key in group.keys() - entries.keys():
                del group[key]
            for key, value in entries.items():
                _set_entry(group, key, value)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _set_entry(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry of a param group, in place if it is a tensor."""
    if isinstance(group.get(key), Tensor):
        group[key].copy_(value)
    else:
        group[key] = value.item() if isinstance(value, Tensor) else value


def _entries(name: str, value: Any, shard: TensorShard) -> Iterator[tuple[str, TensorShard]]:
    """The tensors by which a checkpoint represents one optimizer state of a parameter's shard."""
    if isinstance(value, int | float):
        yield name, TensorShard.unsharded(torch.tensor(value, dtype=torch.float64))
    elif isinstance(value, Tensor):
        tensor = local_tensor(value)
        inner = inner_tensors(tensor)
        if not tensor.dim():
            yield name, TensorShard.unsharded(tensor)
        elif not inner and tensor.shape == shard.tensor.shape:
            yield name, shard._replace(tensor=tensor)
        elif shard.blocks:
            blocks = " ".join(f"{block.offsets}+{block.size}" for block in shard.blocks)
            for number, component in enumerate(inner or [tensor]):
                yield f"{name}.{number}{PART_MARK}{blocks}", TensorShard.unsharded(component)
