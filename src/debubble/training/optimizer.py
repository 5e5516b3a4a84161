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
"""Optimizer name of plans -> its class and default settings."""


STATE_SIZE_MARGIN = 1.1
"""Factor by which optimizer states may exceed the plan's bytes: 8-bit states also have a scale per block."""


def optimizer_maker(
    name: str, settings: Mapping[str, Any] | None = None, *, weight_decay: float, learning_rate: float = 1e-3
) -> MakeOptimizer:
    """Create the factory of the optimizer of a list of parameters.  Weight decay applies to matrices only.

    Args:
        name: One of `OPTIMIZERS`, or an optimizer class as `module:Class`.
        settings: Further arguments of the class.
        weight_decay: Weight decay of matrices.
        learning_rate: Initial value; it is set in every step (see `learning_rate`).

    Raises:
        InputError: If there is no such class.
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
"""Rows and columns of the trial matrix; some 8-bit optimizers keep states of smaller ones in 32 bits."""


def check_optimizer(name: str, make: MakeOptimizer, *, planned: str, saved: bool = False) -> None:
    """Raise InputError for an optimizer that cannot step a model's parameters, or has larger states than planned.

    Args:
        name: Name of the optimizer as the user gave it.
        make: Its factory (see `optimizer_maker`).
        planned: The optimizer that the plan was made for.
        saved: Whether its states are checkpointed, so that they must be tensors and numbers.
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
    state_bytes = sum(map(_bytes, states)) / matrix.numel()
    if state_bytes > STATE_SIZE_MARGIN * MOMENTS[planned]:
        raise InputError(
            f"The optimizer {name} keeps {state_bytes:.3g} bytes per parameter, but the plan counts {MOMENTS[planned]}"
            f" for {planned}: plan with an --optimizer that keeps as many."
        )
    entries = [*optimizer.state[matrix].items(), *(i for g in optimizer.param_groups for i in _changed(g, optimizer))]
    unsaved = {key for key, state in entries if not isinstance(state, Tensor | int | float | None)}
    if saved and unsaved:
        raise InputError(
            f"The optimizer {name} keeps {', '.join(sorted(unsaved))}, which is no tensor and no number, so that no"
            " checkpoint holds it: train without --checkpoint, or with another optimizer."
        )


def _changed(group: Mapping[str, Any], optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The entries of a param group, except tensors, that differ from the optimizer's defaults."""
    for name, value in group.items():
        if name != "params" and not isinstance(value, Tensor) and value != optimizer.defaults.get(name):
            yield name, value


def _bytes(state: Tensor) -> int:
    """The bytes of an optimizer state; single numbers, such as the step count, are ignored."""
    inner = inner_tensors(state)
    return sum(map(_bytes, inner)) if inner else state.nbytes * (state.numel() > 1)


def _optimizer_class(name: str) -> Callable[..., Optimizer]:
    if ":" not in name:
        raise unknown_name(name, [*OPTIMIZERS, "module:Class"], kind="optimizer")
    value = named(name, option="--optimizer")
    if not (isinstance(value, type) and issubclass(value, Optimizer)):
        raise InputError(
            f"--optimizer {name} is no class of torch's optimizers: give one of {', '.join(OPTIMIZERS)}, or"
            " module:Class."
        )
    return value


def set_learning_rate(pipeline: Pipeline, rate: float) -> None:
    """Set the learning rate of all parameters on this rank, for the next step."""
    for optimizer in pipeline.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # in optimizers with a compiled step
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


DECAY_SHARE = 0.2
"""Fraction of the steps in which warm-up-stable-decay decays (Hägele et al., arXiv:2405.18392, section 3)."""

SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
    "wsd": lambda progress: min(1.0, (1 - progress) / DECAY_SHARE),
}
"""Schedule name -> function from the fraction of steps after the warm-up to 1 (the peak) ... 0 (the final rate)."""
FINAL_RATE_SHARE = 0.1
"""Final learning rate as a fraction of the peak."""


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, schedule: str = "cosine") -> float:
    """Linear warm-up to `peak` over `warmup` steps, then one of `SCHEDULES` down to the final rate at the last step.

    Steps count from 0.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * SCHEDULES[schedule](progress))
