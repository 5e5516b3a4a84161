"""Optimizers of one device: steps when the gradient norm is known, and steps before it that can be taken back.

An AdamW step cannot be inverted exactly in floating point.  So a step that may have to be taken back copies what it
changes first: for AdamW 12 bytes per fp32 parameter (the parameter and two moments), where the parameter is: on the
host for a stage that the host steps, divided over the replicas with ZeRO.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.ir import InputError, Kind, Plan
from debubble.runtime.assembly import DevicePart
from debubble.runtime.distributed.gradient_norm import Tally
from debubble.runtime.distributed.sharding import local
from debubble.runtime.models.hf_names import HEAD_TABLE


class Undo:
    """Takes back the last step of one optimizer.  Its buffers stay, for the next step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._copies: dict[Tensor, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def save(self) -> None:
        """Before a step: copy every parameter that has a gradient, and its states."""
        parameters = [p for p in parameters_of(self._optimizer) if p.grad is not None]
        self._states = {p: dict(self._optimizer.state.get(p, {})) for p in parameters}
        states = [value for state in self._states.values() for value in state.values() if isinstance(value, Tensor)]
        changing = [local(tensor) for tensor in (*parameters, *states)]
        if [(t.shape, t.dtype) for t in changing] != [(t.shape, t.dtype) for t in self._copies]:
            self._copies = {t: torch.empty_like(t) for t in changing}
        else:
            self._copies = dict(zip(changing, self._copies.values(), strict=True))
        for tensor, copy in self._copies.items():
            copy.copy_(tensor)

    def restore(self) -> None:
        """After the step: everything as it was before."""
        for tensor, copy in self._copies.items():
            tensor.copy_(copy)
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = state


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Updates:
    """Those optimizers that the program steps, a stage at a time (S), and those that are stepped after it.

    Raises InputError if the plan steps stages and there is no `make`.
    """

    def __init__(self, plan: Plan, part: DevicePart, make: MakeOptimizer | None, *, shares_table: bool) -> None:
        self._part = part
        self._undos: dict[Optimizer, Undo] = {}
        self._lock = threading.Lock()
        stepped = sorted({op.stage for op in plan.schedule.operations if op.kind is Kind.S})
        if stepped and make is None:
            raise InputError("The plan steps stages inside the step: give Pipeline an `optimizer`.")
        self.on_host = plan.schedule.host_steps & set(stepped)
        """The stages of all devices that their hosts step inside the step."""
        self.on_device = set(stepped) - self.on_host
        """The stages that their devices step inside the step."""
        self.inside: dict[int, Optimizer] = {}
        self.outside: list[Optimizer] = []
        if make is not None:
            self.inside = {s: make(part.parameters_of(s)) for s in stepped if s in part.stages}
            taken = {p for optimizer in self.inside.values() for p in parameters_of(optimizer)}
            rest = [p for p in dict.fromkeys(part.masters.values()) if p.requires_grad and p not in taken]
            self.outside = [make(rest)] if rest else []
        self._counted = self._count(shares_table)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [*self.outside, *self.inside.values()]

    @property
    def undo_bytes(self) -> int:
        """Bytes on the device of the copies that take steps back; those of the host's stages are on the host."""
        hosted = {self.inside[s] for s, weights in self._part.weights.items() if weights.on_host and s in self.inside}
        return sum(undo.nbytes for optimizer, undo in self._undos.items() if optimizer not in hosted)

    def squares(self, stages: Sequence[int] | None = None) -> float:
        """Sum of the squares of the gradients of some stages (None: of all) of this device, in double precision."""
        return sum(self._squares(stage) for stage in (self._counted if stages is None else stages))

    def step(self, stage: int) -> None:
        """S, as the plan says: with the stage's gradients as they are."""
        self._part.weights[stage].finish()
        self.inside[stage].step()
        self.inside[stage].zero_grad()

    def step_all(self, optimizers: Sequence[Optimizer], tally: Tally, max_norm: float) -> None:
        """Step these, clipped by the norm of all gradients; not at all if one of them is inf or NaN."""
        for optimizer in optimizers:
            if tally.finite:
                scale_gradients(parameters_of(optimizer), tally.scale(max_norm))
                optimizer.step()
            optimizer.zero_grad()

    def attempt(self, max_norm: float = math.inf, *, trusting: bool = True) -> Attempt:
        """An update of all parameters that may begin before the norm of all gradients is known."""
        return Attempt(self, max_norm, trusting=trusting)

    def undo_of(self, optimizer: Optimizer) -> Undo:
        """What takes this optimizer's steps back."""
        with self._lock:
            return self._undos.setdefault(optimizer, Undo(optimizer))

    def finish(self, stage: int) -> None:
        """Let the masters of a stage have their whole gradients."""
        self._part.weights[stage].finish()

    def _count(self, shares_table: bool) -> dict[int, list[nn.Parameter]]:
        """The parameters of each stage that count in the norm: a tied table does once, in the first stage."""
        counted: dict[int, list[nn.Parameter]] = {}
        seen: set[nn.Parameter] = set()
        for stage, weights in sorted(self._part.weights.items()):
            counted[stage] = []
            for name, parameter in weights.masters.items():
                second = shares_table and name == HEAD_TABLE
                if parameter not in seen and not second and weights.counted(name):
                    counted[stage].append(parameter)
                    seen.add(parameter)
        return counted

    def _squares(self, stage: int) -> float:
        gradients = [local(p.grad) for p in self._counted[stage] if p.grad is not None]
        return float(sum(g.double().square().sum() for g in gradients)) if gradients else 0.0


@dataclass(frozen=True)
class Taken:
    """An optimizer's part of an attempt."""

    optimizer: Optimizer
    settings: list[dict[str, Any]]
    """Its learning rate and the like: by the time it is stepped again, they may be the next step's."""
    undo: Undo | None
    """What takes its step back; None: it waits."""

    def again(self, tally: Tally, max_norm: float) -> None:
        """Take the step back, and take it as is right now that all is known."""
        if self.undo is not None:
            self.undo.restore()
        if tally.finite:
            scale_gradients(parameters_of(self.optimizer), tally.scale(max_norm))
            now = settings_of(self.optimizer)
            change_settings(self.optimizer, self.settings)
            self.optimizer.step()
            change_settings(self.optimizer, now)


class Attempt:
    """The update of one step: an optimizer steps if what is known by then lets it, and else waits.

    Gradients are kept until all is known.
    """

    def __init__(self, updates: Updates, max_norm: float, *, trusting: bool) -> None:
        self._updates, self._trusting = updates, trusting
        self.max_norm = max_norm
        """The clip, as far as it is known when the step begins: `end` has the last word."""
        self._taken: list[Taken] = []
        self._ended = False

    @property
    def ahead(self) -> bool:
        """Whether anything has stepped."""
        return any(taken.undo is not None for taken in self._taken)

    def step(self, stage: int) -> None:
        """S: all that is known are the gradients of the stage itself."""
        self._updates.finish(stage)
        self._take(self._updates.inside[stage], Tally(self._updates.squares([stage])))

    def step_outside(self, known: Tally) -> None:
        """Step the rest, after the program."""
        for optimizer in self._updates.outside:
            self._take(optimizer, known)

    def end(self, tally: Tally, max_norm: float) -> None:
        """All is known: make right what was not, step what has waited, and clear the gradients.  Only once."""
        if self._ended:
            return
        for taken in self._taken:
            if taken.undo is None or not tally.harmless(max_norm):
                taken.again(tally, max_norm)
            taken.optimizer.zero_grad()
        tried = [taken.optimizer for taken in self._taken]
        self._updates.step_all([o for o in self._updates.outside if o not in tried], tally, max_norm)
        self._ended = True

    def _take(self, optimizer: Optimizer, known: Tally) -> None:
        undo = self._updates.undo_of(optimizer) if self._trusting and known.harmless(self.max_norm) else None
        self._taken.append(Taken(optimizer, settings_of(optimizer), undo))
        if undo is not None:
            undo.save()
            optimizer.step()


def scale_gradients(parameters: Iterable[Tensor], scale: float) -> None:
    """Multiply the gradients of these."""
    for parameter in parameters:
        if parameter.grad is not None and scale != 1.0:
            local(parameter.grad).mul_(scale)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's learning rate and the like."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def change_settings(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Replace them."""
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
