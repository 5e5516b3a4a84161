"""A user's model as units: a sequence of modules, each of which maps one tensor to one.

While a module runs, its linear layers can defer their weight gradients, for split backwards, and its random numbers are
seeded by the micro-batch, so that masks do not depend on the order of operations.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from debubble.ir import InputError
from debubble.plans import Plan
from debubble.runtime.memory.recomputation import Operators, PutBack
from debubble.runtime.models.compilation import Compiler, untraced_hooks
from debubble.runtime.models.module_state import ModuleMemory, ModuleState, seeded
from debubble.runtime.models.units import MicroBatch, UnitModule, check_whole_recomputation
from debubble.runtime.operators import Deferring, Multiplication, WeightGradStore, deferrable_linear
from debubble.runtime.torch_internals import FakeTensorMode, saved_tensor_hooks

LARGE_WEIGHT = 2**20
"""Minimum elements of a weight for which gradients are accumulated in place even if no backward is split.

This needs no tensor of the weight's size per micro-batch, but has more overhead than torch's linear.
"""


class ModuleUnit(UnitModule, Deferring):
    """A unit that calls one module with one tensor."""

    def __init__(self, module: nn.Module, *, prefix: str, salt: int) -> None:
        super().__init__()
        self.module = module
        self.prefix, self.salt = prefix, salt
        self._copies_input = False

    def call(self, x: Tensor) -> Tensor:
        """Run the module on its input."""
        y: Tensor = self.module(x)
        return y

    @cached_property
    def state(self) -> ModuleState:
        """The module's state."""
        return ModuleState(self.module)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Run the module as one operator; the last unit returns the loss if there are targets."""
        seed, deferring = self.seed(micro_batch, 0), self.weight_grads.expected
        try:
            y: Tensor = op("module", _ModuleCall(self, seed, deferring), x)
        except _InputChangedError:
            # The unit before may have saved its output: from now on the module gets a copy.
            self._copies_input = True
            y = op("module", _ModuleCall(self, seed, deferring), x)
        return self.loss_of(y, micro_batch, op)

    def run(self, x: Tensor, seed: int, *, deferring: bool) -> Tensor:
        """Call the module with random numbers from the seed.

        `deferring`: whether its linear layers defer their weight gradients.
        """
        # A tensor-parallel module draws no random numbers, and the lock of `seeded` would deadlock in its collectives.
        with seeded(seed, x.device) if self.group.size == 1 else nullcontext():
            if not deferring and not self._replaces_linear:
                return self._call(x)
            with untraced_hooks() if self._is_compiled else _DeferredOperators(self.weight_grads):
                return self._call(x)

    def _call(self, x: Tensor) -> Tensor:
        if self._copies_input:
            return self.call(x.clone())
        try:
            return self.call(x)
        except RuntimeError as error:
            if "is a view and is being modified inplace" in str(error):
                raise _InputChangedError from error
            raise

    @cached_property
    def _is_compiled(self) -> bool:
        return is_compiled(self.module)

    @cached_property
    def _replaces_linear(self) -> bool:
        """True if torch's linear does not suffice even if no backward is split."""
        return self._is_compiled or any(parameter.numel() >= LARGE_WEIGHT for parameter in self.module.parameters())

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile the module, unless the user has compiled it."""
        if not is_compiled(self.module):
            self.module.compile(backend=compiled.backend)

    def hf_name(self, name: str) -> str:
        """A parameter's Hugging Face name."""
        return self.prefix + name.removeprefix("module.")


class _InputChangedError(Exception):
    """A module changes its input in place."""


@dataclass
class _ModuleCall:
    """A repeatable call of a unit's module for one micro-batch."""

    unit: ModuleUnit
    seed: int
    deferring: bool
    _memory: ModuleMemory | None = None

    def remember(self) -> PutBack:
        self._memory = self.unit.state.remember()
        return self._memory.put_back

    def __call__(self, x: Tensor) -> Tensor:
        y = self.unit.run(x, self.seed, deferring=self.deferring)
        if self._memory is not None:
            self._memory.end_run(y)
        return y


def is_compiled(module: nn.Module) -> bool:
    """Tell whether the module or a submodule is compiled, so that its operators cannot be replaced."""
    return "torch._dynamo" in sys.modules and any(
        hasattr(child, "dynamo_ctx") or child._compiled_call_impl is not None for child in module.modules()
    )


def _without_compilation(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Context in which compiled modules run eagerly."""
    return torch.compiler.set_stance("force_eager") if any(map(is_compiled, modules)) else nullcontext()


class _DeferredOperators(TorchFunctionMode):
    """The mode in which a user's module runs, which replaces linear layers by ones that can defer weight gradients.

    Within `torch.utils.checkpoint`, whose recomputation runs outside of the mode, linear layers are not replaced.
    """

    def __init__(self, weight_grads: WeightGradStore) -> None:
        super().__init__()
        self._weight_grads = weight_grads
        self._outside = _saving_mode()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Computed weights are not replaced, as their gradients must flow on through autograd.
        if isinstance(weight, nn.Parameter) and x.dim() > 1 and not self._is_checkpointed:
            (y,) = deferrable_linear(x, [Multiplication(weight, bias)], weight_grads=self._weight_grads)
            return y
        return functional.linear(x, weight, bias)

    @property
    def _is_checkpointed(self) -> bool:
        """True within a checkpointed region: it saves nothing, or by other hooks."""
        return _saving_mode() != self._outside


def _saving_mode() -> tuple[bool, Any]:
    """Whether autograd saves tensors here, and by which hooks."""
    return torch.is_grad_enabled(), saved_tensor_hooks()


@dataclass(frozen=True)
class Modules:
    """The modules of a user's model, divided into a plan's stages."""

    modules: Sequence[nn.Module]
    plan: Plan
    _shapes: dict[torch.Size, tuple[int, ...]] = field(default_factory=dict)

    def stage(self, stage: int) -> list[UnitModule]:
        """The units of one stage."""
        bounds = self._bounds
        return [ModuleUnit(self.modules[i], prefix=f"{i}.", salt=i) for i in range(bounds[stage], bounds[stage + 1])]

    def boundary(self, tokens: Tensor) -> tuple[int, ...]:
        """The shape of activations between stages for an input.  Raises InputError if it differs between stages."""
        if tokens.shape not in self._shapes:
            self._shapes[tokens.shape] = self._boundary(tokens)
        return self._shapes[tokens.shape]

    @property
    def _bounds(self) -> list[int]:
        return list(accumulate((len(units) for units in self.plan.partition), initial=0))

    def _boundary(self, tokens: Tensor) -> tuple[int, ...]:
        shapes_between: set[tuple[int, ...]] = set()
        ends = self._bounds[1:-1]
        # Fake mode also replaces tensors of modules that are neither parameters nor buffers.
        with _without_compilation(self.modules), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x = torch.empty_like(tokens)
            for index, module in enumerate(self.modules[: max(ends, default=0)]):
                # Checkpointed modules warn of inputs without gradients, and warning filters are not thread-safe.
                x.requires_grad_(x.is_floating_point())
                tensors = dict(module.named_parameters()) | dict(module.named_buffers())
                x = functional_call(module, {n: torch.empty_like(t, device=x.device) for n, t in tensors.items()}, (x,))
                if index + 1 in ends:
                    shapes_between.add(tuple(x.shape))
        if len(shapes_between) > 1:
            shapes = " and ".join(str(list(shape)) for shape in sorted(shapes_between))
            raise InputError(
                f"The plan's stages would hand on tensors of shapes {shapes}: cut where they are the same."
            )
        return next(iter(shapes_between), ())


def sequence_of(model: nn.Module | None, plan: Plan) -> Modules:
    """The modules of a user's model, for a plan of measured units or stage costs.

    The model is an `nn.Sequential`, or has a method `pipeline_units` that returns its modules in order.  Raises
    InputError if it does not fit the plan.
    """
    modules = None if model is None else modules_of(model)
    if modules is None:
        raise InputError(
            "The plan has no model: give Pipeline one that is an nn.Sequential or has `pipeline_units()`, or make the"
            " plan for a model."
        )
    planned = [unit for stage in plan.partition for unit in stage]
    if len(modules) != len(planned):
        raise InputError(f"The model has {len(modules)} modules, but the plan's stages have {len(planned)} units.")
    if plan.options.tensor > 1 or plan.options.lora:
        raise InputError("Modules of your own have neither tensor parallelism nor LoRA: make the plan without.")
    check_whole_recomputation(planned, "Modules of your own")
    sequence = Modules(modules, plan)
    _check_shared(sequence)
    return sequence


def modules_of(model: nn.Module) -> list[nn.Module] | None:
    """The modules of a model in order; None if it is neither an `nn.Sequential` nor has `pipeline_units`."""
    units = getattr(model, "pipeline_units", None)
    if units is None and not isinstance(model, nn.Sequential):
        return None
    # `children()` would list a repeated module once.
    return list(model if units is None else units())  # type: ignore[arg-type]


def _check_shared(sequence: Modules) -> None:
    """Refuse parameters that are shared between devices."""
    users: dict[nn.Parameter, set[int]] = defaultdict(set)
    names: dict[nn.Parameter, str] = {}
    for stage, device in enumerate(sequence.plan.schedule.placement.device_of):
        for unit in sequence.stage(stage):
            for name, parameter in unit.hf_parameters().items():
                users[parameter].add(device)
                names.setdefault(parameter, name)
    for parameter, devices in users.items():
        if len(devices) > 1:
            raise InputError(
                f"Devices {', '.join(map(str, sorted(devices)))} share the parameter '{names[parameter]}': place their"
                " stages on one device (a V-shaped placement does, of the first and the last), or untie it."
            )
