"""`torch.compile` for the units of a device.

Units of our own call operators one by one, as plans recompute them, and leave the weight gradients of linear layers to
W.  So what is compiled are the functions between linear layers, each once for all layers.  Modules of transformers and
of the user are compiled whole; those that are alike share a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from debubble.ir import InputError, Kind
from debubble.plans import Plan
from debubble.runtime.torch_internals import saved_tensor_hooks

Function = Callable[..., Any]


class Compiler:
    """Compiles functions, each once, with one of the backends of `torch.compile`."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._compiled: dict[Function, Function] = {}

    def __call__(self, function: Function) -> Function:
        """Return the compiled function."""
        if function not in self._compiled:
            compiled = torch.compile(function, backend=self.backend)

            def untraced(*arguments: Any) -> Any:
                with untraced_hooks():
                    return compiled(*arguments)

            self._compiled[function] = untraced
        return self._compiled[function]


def untraced_hooks() -> AbstractContextManager[None]:
    """A context in which `torch.compile` leaves alone the hooks that are given the tensors that autograd saves."""
    hooks = saved_tensor_hooks()
    return nullcontext() if hooks is None else saved_tensors_hooks(*map(torch.compiler.disable, hooks))


def compiler_of(wanted: bool | str, plan: Plan) -> Compiler | None:
    """The compiler of a plan's units, with torch's usual backend or the one that is named; None: they are not compiled.

    Raises InputError if a module that is compiled whole cannot run the plan, or torch has no such backend.
    """
    if wanted is False:
        return None
    backend = "inductor" if wanted is True else wanted
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        raise InputError(f"torch.compile has no backend '{backend}': see torch.compiler.list_backends().")
    if plan.model is None or plan.model.whole_layers:
        _check_whole_modules(plan)
    return Compiler(backend)


def _check_whole_modules(plan: Plan) -> None:
    if any(op.kind is Kind.W for op in plan.schedule.operations):
        raise InputError(
            "Modules that are compiled whole compute weight gradients with their input's, so that no backward is split:"
            " plan a schedule of whole backwards, or train without compiling."
        )
    if plan.options.tensor > 1:
        raise InputError(
            "Modules that are compiled whole have no tensor parallelism: plan with --tensor 1, or train without"
            " compiling."
        )
