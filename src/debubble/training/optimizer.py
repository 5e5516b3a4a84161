"""The optimizer of `debubble train`, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from debubble.costs.step import MOMENTS
from debubble.ir import InputError
from debubble.registry import unknown_name
from debubble.runtime.distributed.sharding import inner_tensors
from debubble.runtime.parameters.optimizers import MakeOptimizer
from debubble.runtime.pipeline import Pipeline
from debubble.training.user_code import named

OPTIMIZERS: Mapping[str, tuple[type[Optimizer], Mapping[str, Any]]] = {
    "adamw": (AdamW, {"betas": (0.9, 0.95), "fused": True}),
    "adam": (Adam, {"betas": (0.9, 0.95), "fused": True}),
    "momentum": (SGD, {"momentum": 0.9}),
    "sgd": (SGD, {}),
}
"""Optimizers by the names that plans have for them, with the settings that they get here."""


STATE_SIZE_MARGIN = 1.1
"""Factor by which states may take more than a plan counts: those in 8 bits also have a scale for every block."""


def optimizer_maker(
    name: str, settings: Mapping[str, Any] | None = None, *, weight_decay: float, learning_rate: float = 1e-3
) -> MakeOptimizer:
    """Make the function that makes the optimizer of some parameters.  Only matrices decay.

    Args:
        name: One of `OPTIMIZERS`, or an optimizer's class as `module:Class`.
        settings: Arguments of the class, next to parameters, learning rate and decay.
        weight_decay: Of matrices.
        learning_rate: Set anew in every step (see `learning_rate`).

    Raises:
        InputError: There is no such class.
    """
    kind, usual = OPTIMIZERS[name] if name in OPTIMIZERS else (_optimizer_class(name), {})

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0},
        ]  # fmt: skip
        construct: Callable[..., Optimizer] = kind
        return construct([g for g in groups if g["params"]], **{"lr": learning_rate, **usual, **(settings or {})})

    return make


TRIAL_MATRIX_SIZE = 256
"""Rows and columns of the matrix that an optimizer is tried on: smaller ones some keep in 32 bits."""


def check_optimizer(name: str, make: MakeOptimizer, *, planned: str, saved: bool = False) -> None:
    """Refuse an optimizer that cannot step a model's parameters, or keeps more than the plan counts for its states.

    Args:
        name: As the user gave it.
        make: Makes it (see `optimizer_maker`).
        planned: The optimizer that the plan was made for.
        saved: Whether checkpoints hold its states, which must then be tensors and numbers.
    """
    trial = [
        nn.Parameter(torch.ones(TRIAL_MATRIX_SIZE, TRIAL_MATRIX_SIZE)),
        nn.Parameter(torch.ones(TRIAL_MATRIX_SIZE)),
    ]
    try:
        optimizer = make(trial)
        for parameter in trial:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except Exception as error:
        raise InputError(f"The optimizer {name} cannot step a matrix and a vector: {error}") from error
    matrix = trial[0]
    states = [state for state in optimizer.state[matrix].values() if isinstance(state, Tensor)]
    kept = sum(map(_bytes, states)) / matrix.numel()
    if kept > STATE_SIZE_MARGIN * MOMENTS[planned]:
        raise InputError(
            f"The optimizer {name} keeps {kept:.3g} bytes per parameter, but the plan counts {MOMENTS[planned]} for"
            f" {planned}: plan with an --optimizer that keeps as many."
        )
    entries = [*optimizer.state[matrix].items(), *(i for g in optimizer.param_groups for i in _changed(g, optimizer))]
    others = {key for key, state in entries if not isinstance(state, Tensor | int | float | None)}
    if saved and others:
        raise InputError(
            f"The optimizer {name} keeps {', '.join(sorted(others))}, which is no tensor and no number, so that no"
            " checkpoint holds it: train without --checkpoint, or with another optimizer."
        )


def _changed(group: Mapping[str, Any], optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The entries of a group that are no settings, and not as they were made."""
    for name, value in group.items():
        if name != "params" and not isinstance(value, Tensor) and value != optimizer.defaults.get(name):
            yield name, value


def _bytes(state: Tensor) -> int:
    """The bytes of an optimizer's state; a single number, which all have, is none."""
    inner = inner_tensors(state)
    return sum(map(_bytes, inner)) if inner else state.nbytes * (state.numel() > 1)


def _optimizer_class(name: str) -> Callable[..., Optimizer]:
    if ":" not in name:
        raise unknown_name(name, [*OPTIMIZERS, "module:Class"], kind="optimizer")
    found = named(name, option="--optimizer")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise InputError(
            f"--optimizer {name} is no class of torch's optimizers: give one of {', '.join(OPTIMIZERS)}, or"
            " module:Class."
        )
    return found


def set_learning_rate(pipeline: Pipeline, rate: float) -> None:
    """Set the learning rate of all parameters on this rank, for the next step."""
    for optimizer in pipeline.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # of optimizers that compile their step
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


DECAY_SHARE = 0.2
"""Share of the steps in which warm-up-stable-decay decays (Hägele et al., arXiv:2405.18392, section 3)."""

SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
    "wsd": lambda progress: min(1.0, (1 - progress) / DECAY_SHARE),
}
"""Learning rates after the warm-up, from 1 (the peak) to 0 (the floor), by the share of the steps that are done."""
FINAL_RATE_SHARE = 0.1
"""Share of the peak to which the learning rate falls."""


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, schedule: str = "cosine") -> float:
    """Linear warm-up to `peak` over `warmup` steps, then one of `SCHEDULES` down to the floor at the last step.

    Steps count from 0.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * SCHEDULES[schedule](progress))
