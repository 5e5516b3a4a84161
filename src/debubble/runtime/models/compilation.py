"""`torch.compile` for the units of a device.

debubble's own units call operators one by one, for recomputation, and defer the weight gradients of linear layers to W.
So the functions between linear layers are compiled, each once for all layers.  Modules of transformers and of the user
are compiled whole; equal ones share a graph.
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
    """Compiles functions, each once, with a backend of `torch.compile`."""

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
    """Context in which `torch.compile` does not trace the saved-tensor hooks."""
    hooks = saved_tensor_hooks()
    return nullcontext() if hooks is None else saved_tensors_hooks(*map(torch.compiler.disable, hooks))


def compiler_of(compile: bool | str, plan: Plan) -> Compiler | None:
    """The compiler of a plan's units, with the default or the named backend; None: they are not compiled.

    Raises InputError if modules that are compiled whole cannot run the plan, or torch has no such backend.
    """
    if compile is False:
        return None
    backend = "inductor" if compile is True else compile
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
