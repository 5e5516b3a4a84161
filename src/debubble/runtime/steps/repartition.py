"""Moves units between the devices of a pipeline, with gradients, optimizer states and averages.

A unit moves to the rank with the same replica, slice and tensor rank on another device, so ZeRO, tensor and expert
parallelism shard its parameters as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from debubble.ir import InputError
from debubble.plans import Plan
from debubble.runtime.distributed.sharding import inner_tensors, local_tensor, viewed_like
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.parameters.optimizer_states import parameters_of
from debubble.runtime.parameters.optimizers import DeviceOptimizers
from debubble.runtime.topology import Ranks

PARAMETER, GRADIENT, AVERAGE, STATE = "parameter", "gradient", "average", "state "
"""Keys of a parameter's state; keys of optimizer states are the last one followed by their names."""

ParameterState = dict[str, Any]
"""The state of a parameter's shard on this rank: local tensors, and numbers of the optimizer."""


def exchange_units(
    ranks: Ranks, before: Plan, after: Plan, device_part: DevicePart, optimizers: DeviceOptimizers, *, on: torch.device
) -> dict[str, ParameterState]:
    """Send units to the ranks that have them in the plan `after`.  All ranks call it.

    Args:
        ranks: The ranks of the run.
        before: The plan of `device_part`.
        after: The new plan.
        device_part: This rank's stages and parameters.
        optimizers: The parameters' optimizers.
        on: torch device of the messages.

    Returns:
        The states of this rank's parameters in the new plan, by Hugging Face name.

    Raises:
        InputError: An optimizer has states that cannot be moved.
    """
    states = dict(_local_states(device_part, optimizers))
    device_of = _device_of(after)
    leaving: dict[int, dict[str, ParameterState]] = {}
    for number, stage in device_part.stages.items():
        for unit, planned in zip(stage.units, before.partition[number], strict=True):
            device = device_of[planned.type, planned.layer]
            if device != ranks.device:
                names = unit.hf_parameters()
                leaving.setdefault(ranks.rank_of[device], {}).update({name: states.pop(name) for name in names})
    return states | _exchange(ranks.transport, leaving, on)


def restore_states(
    device_part: DevicePart,
    optimizers: DeviceOptimizers,
    before: DeviceOptimizers,
    states: Mapping[str, ParameterState],
) -> None:
    """Restore the states of parameters and optimizers in newly built stages.

    Args:
        device_part: The new stages.
        optimizers: Their optimizers, which have not stepped yet.
        before: The optimizers of the old stages.
        states: The parameters' states, by Hugging Face name.
    """
    optimizers.continue_with(before)
    optimizer_of = {p: optimizer for optimizer in optimizers.all for p in parameters_of(optimizer)}
    averages: dict[Tensor, Tensor] = {}
    for name, parameter in device_part.masters.items():
        for key, value in states[name].items():
            if key == PARAMETER:
                local_tensor(parameter).copy_(value)
            elif key == GRADIENT:
                parameter.grad = viewed_like(parameter, value)
            elif key == AVERAGE:
                averages[parameter] = value
            else:
                optimizer_of[parameter].state[parameter][key.removeprefix(STATE)] = _as_state(parameter, value)
    if optimizers.averages is not None:
        optimizers.averages.continue_with(averages)
    device_part.load_working()


def _device_of(plan: Plan) -> dict[tuple[str, int | None], int]:
    """The device of each unit, by type and layer."""
    placement = plan.schedule.placement.device_of
    return {(u.type, u.layer): d for stage, d in zip(plan.partition, placement, strict=True) for u in stage}


def _local_states(device_part: DevicePart, optimizers: DeviceOptimizers) -> Iterator[tuple[str, ParameterState]]:
    """The states of this rank's parameters, by Hugging Face name."""
    optimizer_states = {p: values for optimizer in optimizers.all for p, values in optimizer.state.items()}
    for name, parameter in device_part.masters.items():
        state: ParameterState = {PARAMETER: local_tensor(parameter)}
        if parameter.grad is not None:
            state[GRADIENT] = local_tensor(parameter.grad)
        if optimizers.averages is not None and (average := optimizers.averages.get(parameter)) is not None:
            state[AVERAGE] = average
        for key, value in optimizer_states.get(parameter, {}).items():
            if hasattr(value, "device_mesh") and value.shape != parameter.shape:
                raise InputError(
                    f"The optimizer divides '{key}' of a parameter over ranks in a way of its own: units cannot move."
                )
            state[STATE + key] = local_tensor(value) if isinstance(value, Tensor) else value
        yield name, state


def _as_state(parameter: nn.Parameter, value: Any) -> Any:
    """A value as an optimizer state: a DTensor if the parameter is one and has this shape."""
    equal_shapes = isinstance(value, Tensor) and value.dim() and value.shape == local_tensor(parameter).shape
    return viewed_like(parameter, value) if equal_shapes else value


def _exchange(
    transport: Transport, leaving: Mapping[int, dict[str, ParameterState]], on: torch.device
) -> dict[str, ParameterState]:
    """Send the leaving states to their ranks, and return the arriving ones.

    Pairs of ranks exchange in the same order on all ranks, which avoids deadlocks.
    """
    forms_of = {to: {name: _forms(state) for name, state in states.items()} for to, states in leaving.items()}
    all_forms = transport.gather(forms_of)
    pairs = [(source, to) for source, forms in enumerate(all_forms) for to in forms]
    transport.open([(source, to, Channel.UNITS) for source, to in pairs], [])
    arrived: dict[str, ParameterState] = {}
    for source, to in pairs:
        if transport.rank == source:
            for value in (value for state in leaving[to].values() for value in state.values()):
                for tensor in _plain_tensors(value):
                    transport.send(tensor.to(on), to, Channel.UNITS)
        elif transport.rank == to:
            for name, forms in all_forms[source][to].items():
                arrived[name] = {key: _receive(transport, source, form, on) for key, form in forms.items()}
    return arrived


@dataclass(frozen=True)
class _PlainForm:
    """The shape, dtype and device type of a plain tensor."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


@dataclass(frozen=True)
class _WrappedForm:
    """The form of a wrapper subclass, which consists of inner tensors."""

    kind: Any
    inner: Mapping[str, _PlainForm]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _forms(state: ParameterState) -> dict[str, Any]:
    return {key: _form(value) for key, value in state.items()}


def _form(value: Any) -> Any:
    """The form of a value, which its receiver needs before the message; a number is its own form."""
    if not isinstance(value, Tensor):
        return value
    inner = inner_tensors(value)
    if not inner:
        return _PlainForm(value.shape, value.dtype, value.device.type == "cpu")
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    forms = {name: _form(tensor) for name, tensor in zip(names, inner, strict=True)}
    return _WrappedForm(type(value), forms, context, value.shape, value.stride())


def _plain_tensors(value: Any) -> list[Tensor]:
    """The tensors that are sent for a value."""
    return (inner_tensors(value) or [value]) if isinstance(value, Tensor) else []


def _receive(transport: Transport, source: int, form: Any, on: torch.device) -> Any:
    """Receive the tensors of a value of that form."""
    match form:
        case _PlainForm(shape, dtype, on_host):
            tensor = transport.receive(torch.empty(shape, dtype=dtype, device=on), source, Channel.UNITS)
            return tensor.cpu() if on_host else tensor
        case _WrappedForm(kind, inner, context, size, stride):
            tensors = {name: _receive(transport, source, inner_form, on) for name, inner_form in inner.items()}
            return kind.__tensor_unflatten__(tensors, context, size, stride)
    return form
