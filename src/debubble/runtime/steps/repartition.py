"""Moves units between the devices of a pipeline, with all that trains them.

A unit goes to the rank that is the same replica, slice and part of another device, so ZeRO, tensor and expert
parallelism divide its parameters there as they did here.
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
"""The parts of a parameter's state; an optimizer's states have their names after the last."""

ParameterState = dict[str, Any]
"""This rank's part of a parameter's state: tensors, without DTensors around them, and an optimizer's plain numbers."""


def exchange_units(
    ranks: Ranks, before: Plan, after: Plan, part: DevicePart, optimizers: DeviceOptimizers, *, on: torch.device
) -> dict[str, ParameterState]:
    """Send units to the ranks that have them by the plan `after`.  All ranks call it.

    Args:
        ranks: All ranks.
        before: The plan that `part` was built by.
        after: The one whose units are wanted.
        part: This rank's stages and parameters.
        optimizers: Those of the parameters.
        on: The device through which messages go.

    Returns:
        The state of each parameter that this rank has by that plan, by Hugging Face name.

    Raises:
        InputError: An optimizer has states that cannot be given to another.
    """
    states = dict(_own_states(part, optimizers))
    device_of = _device_of(after)
    leaving: dict[int, dict[str, ParameterState]] = {}
    for number, stage in part.stages.items():
        for unit, planned in zip(stage.units, before.partition[number], strict=True):
            device = device_of[planned.type, planned.layer]
            if device != ranks.device:
                names = unit.hf_parameters()
                leaving.setdefault(ranks.rank_of[device], {}).update({name: states.pop(name) for name in names})
    return states | _exchange(ranks.transport, leaving, on)


def restore_states(
    part: DevicePart, optimizers: DeviceOptimizers, before: DeviceOptimizers, states: Mapping[str, ParameterState]
) -> None:
    """Let a part that has just been built continue with the states of its parameters, and with earlier optimizers.

    Args:
        part: The stages as they are now.
        optimizers: Theirs, which have stepped nothing yet.
        before: Those of the stages as they were.
        states: Those of the parameters, by Hugging Face name.
    """
    optimizers.continue_with(before)
    optimizer_of = {p: optimizer for optimizer in optimizers.all for p in parameters_of(optimizer)}
    averages: dict[Tensor, Tensor] = {}
    for name, parameter in part.masters.items():
        for what, value in states[name].items():
            if what == PARAMETER:
                local_tensor(parameter).copy_(value)
            elif what == GRADIENT:
                parameter.grad = viewed_like(parameter, value)
            elif what == AVERAGE:
                averages[parameter] = value
            else:
                optimizer_of[parameter].state[parameter][what.removeprefix(STATE)] = _as_state(parameter, value)
    if optimizers.averages is not None:
        optimizers.averages.continue_with(averages)
    part.load_working()


def _device_of(plan: Plan) -> dict[tuple[str, int | None], int]:
    """The device of each unit, by type and layer."""
    placement = plan.schedule.placement.device_of
    return {(u.type, u.layer): d for stage, d in zip(plan.partition, placement, strict=True) for u in stage}


def _own_states(part: DevicePart, optimizers: DeviceOptimizers) -> Iterator[tuple[str, ParameterState]]:
    """This rank's state of each parameter, by Hugging Face name."""
    of_optimizers = {p: its for optimizer in optimizers.all for p, its in optimizer.state.items()}
    for name, parameter in part.masters.items():
        state: ParameterState = {PARAMETER: local_tensor(parameter)}
        if parameter.grad is not None:
            state[GRADIENT] = local_tensor(parameter.grad)
        if optimizers.averages is not None and (average := optimizers.averages.of(parameter)) is not None:
            state[AVERAGE] = average
        for what, value in of_optimizers.get(parameter, {}).items():
            if hasattr(value, "device_mesh") and value.shape != parameter.shape:
                raise InputError(
                    f"The optimizer divides '{what}' of a parameter over ranks in a way of its own: units cannot move."
                )
            state[STATE + what] = local_tensor(value) if isinstance(value, Tensor) else value
        yield name, state


def _as_state(parameter: nn.Parameter, value: Any) -> Any:
    """A state as an optimizer keeps it: one of the parameter's shape is a DTensor where the parameter is."""
    equal_shapes = isinstance(value, Tensor) and value.dim() and value.shape == local_tensor(parameter).shape
    return viewed_like(parameter, value) if equal_shapes else value


def _exchange(
    transport: Transport, leaving: Mapping[int, dict[str, ParameterState]], on: torch.device
) -> dict[str, ParameterState]:
    """Send to each rank what leaves for it, and return what comes.

    The pairs of ranks take turns in an order that all know, so that none waits for one that waits for it.
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
                arrived[name] = {what: _receive(transport, source, form, on) for what, form in forms.items()}
    return arrived


@dataclass(frozen=True)
class _PlainForm:
    """The room that a tensor takes."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


@dataclass(frozen=True)
class _WrappedForm:
    """A tensor of a class of its own, which consists of others."""

    kind: Any
    inner: Mapping[str, _PlainForm]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _forms(state: ParameterState) -> dict[str, Any]:
    return {what: _form(value) for what, value in state.items()}


def _form(value: Any) -> Any:
    """The form of a value, which its receiver must know before it comes; of a plain number, the number itself."""
    if not isinstance(value, Tensor):
        return value
    inner = inner_tensors(value)
    if not inner:
        return _PlainForm(value.shape, value.dtype, value.device.type == "cpu")
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    forms = {name: _form(tensor) for name, tensor in zip(names, inner, strict=True)}
    return _WrappedForm(type(value), forms, context, value.shape, value.stride())


def _plain_tensors(value: Any) -> list[Tensor]:
    """The tensors that are sent for a value, in order."""
    return (inner_tensors(value) or [value]) if isinstance(value, Tensor) else []


def _receive(transport: Transport, source: int, form: Any, on: torch.device) -> Any:
    """The value of that form, whose tensors come next."""
    match form:
        case _PlainForm(shape, dtype, on_host):
            tensor = transport.receive(torch.empty(shape, dtype=dtype, device=on), source, Channel.UNITS)
            return tensor.cpu() if on_host else tensor
        case _WrappedForm(kind, inner, context, size, stride):
            tensors = {name: _receive(transport, source, each, on) for name, each in inner.items()}
            return kind.__tensor_unflatten__(tensors, context, size, stride)
    return form
