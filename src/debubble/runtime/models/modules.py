"""A user's own model as units: a sequence of modules, each of which maps one tensor to one.

While a module runs, its linear layers are replaced by those that can leave their weight gradients for later, and its
random numbers follow from the micro-batch: so backwards split, and no order of operations changes a mask.
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
"""Numbers of a weight from which on its gradient is added where it is to be, also where no backward is split.

Those operators need no tensor of the weight's size per micro-batch, and take longer to call than torch's own.
"""


class ModuleUnit(UnitModule, Deferring):
    """One module, called with one tensor."""

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
        """The state of the module."""
        return ModuleState(self.module)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Run the module as the single operator `module`; the last unit returns the loss if there are targets."""
        seed, deferring = self.seed(micro_batch, 0), self.weight_grads.expected
        try:
            y: Tensor = op("module", _ModuleCall(self, seed, deferring), x)
        except _InputChangedError:
            # The unit before may have saved it: from now on the module gets a copy.
            self._copies_input = True
            y = op("module", _ModuleCall(self, seed, deferring), x)
        return self.loss_of(y, micro_batch, op)

    def run(self, x: Tensor, seed: int, *, deferring: bool) -> Tensor:
        """Call the module; its random numbers follow from the seed.

        `deferring`: whether its linear layers can leave their weight gradients for later.
        """
        # Ranks that divide the module meet in it, and must not keep each other from the generators: it draws nothing.
        with seeded(seed, x.device) if self.group.size == 1 else nullcontext():
            if not deferring and not self._has_own_operators:
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
    def _has_own_operators(self) -> bool:
        """True if torch's own operators do not do, even if no backward is split."""
        return self._is_compiled or any(parameter.numel() >= LARGE_WEIGHT for parameter in self.module.parameters())

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile the whole module, unless the user has."""
        if not is_compiled(self.module):
            self.module.compile(backend=compiled.backend)

    def hf_name(self, name: str) -> str:
        """A parameter's Hugging Face name, from its name in this unit."""
        return self.prefix + name.removeprefix("module.")


class _InputChangedError(Exception):
    """A module changes its input in place."""


@dataclass
class _ModuleCall:
    """The call of a unit's module for one micro-batch, which may be repeated."""

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
    """Tell whether `torch.compile` has made the module or a part of it: their operators cannot be replaced."""
    return "torch._dynamo" in sys.modules and any(
        hasattr(part, "dynamo_ctx") or part._compiled_call_impl is not None for part in module.modules()
    )


def _without_compilation(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """A context in which compiled modules run as they were before."""
    return torch.compiler.set_stance("force_eager") if any(map(is_compiled, modules)) else nullcontext()


class _DeferredOperators(TorchFunctionMode):
    """The mode in which a module of the user's runs.

    `torch.utils.checkpoint` runs a part of it again in the backward, outside of the mode: that part has torch's own
    operators.
    """

    def __init__(self, weight_grads: WeightGradStore) -> None:
        super().__init__()
        self._weight_grads = weight_grads
        self._outside = _saving()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Of a weight that is computed, the gradient goes on to what it is computed from.
        if isinstance(weight, nn.Parameter) and x.dim() > 1 and not self._runs_again:
            (y,) = deferrable_linear(x, [Multiplication(weight, bias)], weight_grads=self._weight_grads)
            return y
        return functional.linear(x, weight, bias)

    @property
    def _runs_again(self) -> bool:
        """Tell whether this is a part that is checkpointed: it saves nothing, or by hooks of its own."""
        return _saving() != self._outside


def _saving() -> tuple[bool, Any]:
    """The way in which autograd saves tensors here: whether it does, and by which hooks."""
    return torch.is_grad_enabled(), saved_tensor_hooks()


@dataclass(frozen=True)
class Modules:
    """The modules of a user's model, cut into a plan's stages."""

    modules: Sequence[nn.Module]
    plan: Plan
    _shapes: dict[torch.Size, tuple[int, ...]] = field(default_factory=dict)

    def stage(self, stage: int) -> list[UnitModule]:
        """The units of one stage."""
        bounds = self._bounds
        return [ModuleUnit(self.modules[i], prefix=f"{i}.", salt=i) for i in range(bounds[stage], bounds[stage + 1])]

    def boundary(self, tokens: Tensor) -> tuple[int, ...]:
        """The shape of what stages hand on for such an input.  Raises InputError if it differs between them."""
        if tokens.shape not in self._shapes:
            self._shapes[tokens.shape] = self._boundary(tokens)
        return self._shapes[tokens.shape]

    @property
    def _bounds(self) -> list[int]:
        return list(accumulate((len(units) for units in self.plan.partition), initial=0))

    def _boundary(self, tokens: Tensor) -> tuple[int, ...]:
        handed_on: set[tuple[int, ...]] = set()
        ends = self._bounds[1:-1]
        # Fake tensors stand for those that modules hold besides parameters and buffers, too.
        with _without_compilation(self.modules), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x = torch.empty_like(tokens)
            for index, module in enumerate(self.modules[: max(ends, default=0)]):
                # Checkpointed modules warn of inputs without gradients.  To silence warnings here would race: Python's
                # filters belong to the process, and ranks may be threads.
                x.requires_grad_(x.is_floating_point())
                tensors = dict(module.named_parameters()) | dict(module.named_buffers())
                x = functional_call(module, {n: torch.empty_like(t, device=x.device) for n, t in tensors.items()}, (x,))
                if index + 1 in ends:
                    handed_on.add(tuple(x.shape))
        if len(handed_on) > 1:
            shapes = " and ".join(str(list(shape)) for shape in sorted(handed_on))
            raise InputError(
                f"The plan's stages would hand on tensors of shapes {shapes}: cut where they are the same."
            )
        return next(iter(handed_on), ())


def sequence_of(model: nn.Module | None, plan: Plan) -> Modules:
    """The model as the units of a plan that was made for units or stages of given costs.

    It is an `nn.Sequential`, or has a method `pipeline_units` that returns its modules in order.  Raises InputError if
    it does not fit the plan.
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
    """The modules of a sequence in order; None if the model is no sequence of some."""
    units = getattr(model, "pipeline_units", None)
    if units is None and not isinstance(model, nn.Sequential):
        return None
    # `children()` would name a module that is used twice once.
    return list(model if units is None else units())  # type: ignore[arg-type]


def _check_shared(sequence: Modules) -> None:
    """Refuse parameters that two devices would each have a copy of."""
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
