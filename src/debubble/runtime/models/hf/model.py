"""A causal model of transformers without its layers, which pass through stand-ins: what it does before, after, around.

The model is built on the meta device.  Its layers are the entries of the one list of modules in its base model; a trial
shows which of the other modules run before them and which after.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.runtime.models.hf.initialization import INITIALISING, materialise
from debubble.runtime.models.hf.names import HEAD_TABLE, TABLE

TRIAL_SHAPE = 1, 4
"""Rows and tokens of the trial that shows how the model calls its layers."""


class LayerArguments(NamedTuple):
    """The arguments that the model gives a layer: the hidden states, and what else it needs."""

    hidden: Tensor
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


class ForwardProbe:
    """The model's forward, which notes what each layer is given and may replace what the last one returns."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.tuple_size = 0
        """Size of the tuples whose first entries are the layers' results; 0: they return these alone."""
        self.given: list[LayerArguments] = []
        self.embedded: Tensor | None = None
        """The hidden states that the model is given in place of tokens."""
        self.result: Tensor | None = None
        """The tensor that the last layer is to return; None: the one that the first is given."""
        self.before: dict[str, bool] = {}
        """True if a module that other units have runs before the layers, by its name."""

    def past(self, given: LayerArguments) -> Any:
        """Note a layer's arguments, and return what the model is to continue with in place of the layer's result."""
        self.given.append(given)
        replaced = self.result is not None and len(self.given) == self.layers
        y = self.result if replaced else given.hidden
        return (y, *[None] * (self.tuple_size - 1)) if self.tuple_size else y

    def absent(self, name: str, x: Any) -> Any:
        """Note on which side of the layers a module runs, and return what stands for its result there."""
        before = not self.given
        if self.before.setdefault(name, before) != before:
            raise ValueError(f"it uses '{name}' on both sides of its layers")
        return self.embedded if before else x


class _LayerProbe(nn.Module):
    """A module in a layer's place, with the plain attributes that the model may ask it for."""

    def __init__(self, layer: nn.Module, probe: ForwardProbe) -> None:
        super().__init__()
        self.probe = probe
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float)):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        return self.probe.past(LayerArguments(hidden_states, arguments, named))


class _MissingModule(nn.Module):
    """A module in the place of one that another unit has: its result there is of no account."""

    def __init__(self, name: str, probe: ForwardProbe) -> None:
        super().__init__()
        self.name, self.probe = name, probe

    def forward(self, x: Any = None, *_: Any, **__: Any) -> Any:
        return self.probe.absent(self.name, x)


@dataclass(frozen=True)
class NonLayerModules:
    """The model with stand-ins for its layers, and perhaps for what comes before or after them."""

    causal: Any
    probe: ForwardProbe

    def up_to_layers(self, tokens: Tensor) -> Tensor:
        """The hidden states that the first layer is given for these tokens."""
        return self._arguments(input_ids=tokens)[0].hidden

    def from_layers(self, x: Tensor) -> Tensor:
        """The logits, if the last layer returns `x`."""
        self.probe.result, self.probe.embedded = x, _unused(x)
        logits: Tensor = self.causal(inputs_embeds=self.probe.embedded, use_cache=False).logits
        self._take_arguments()
        return logits

    def around_layers(self, x: Tensor) -> Sequence[LayerArguments]:
        """The arguments that each layer is given, if hidden states such as `x` come from the embedding."""
        self.probe.embedded = _unused(x)
        return self._arguments(inputs_embeds=self.probe.embedded)

    def _arguments(self, **inputs: Tensor) -> list[LayerArguments]:
        base_of(self.causal)(**inputs, use_cache=False)
        return self._take_arguments()

    def _take_arguments(self) -> list[LayerArguments]:
        given, self.probe.given, self.probe.result, self.probe.embedded = self.probe.given, [], None, None
        return given


def _unused(x: Tensor) -> Tensor:
    """Hidden states whose values are of no account; a model may change them in place.  NaN stays NaN."""
    return x.detach() * 0


def base_of(causal: Any) -> Any:
    """The part of a causal model that has no head, under whatever name."""
    if causal.base_model is not causal:
        return causal.base_model
    inner = [child for child in causal.children() if hasattr(child, "base_model")]
    return inner[0] if len(inner) == 1 else causal


class ModelParts:
    """The parts of a model that make up its units.  Raises InputError if it cannot be divided between its layers."""

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> None:
        self.model = on_meta(config, dtype=dtype)
        """Whole, on the meta device, with stand-ins for its layers and its constants as frozen parameters."""
        self.constants = frozenset(_freeze_buffers(self.model))
        """The names of constants that stay in the dtype that they have, whatever that of the run."""
        self.path, self.layers = _list_of_layers(self.model, config)
        """The name of the list of layers, and the list."""
        self.tables = tables_of(self.model)
        self._before: frozenset[str] = frozenset()
        self._probe = ForwardProbe(len(self.layers))
        owner, _, own = self.path.rpartition(".")
        standing = nn.ModuleList(_LayerProbe(layer, self._probe) for layer in self.layers)
        setattr(self.model.get_submodule(owner), own, standing)
        self._around = self._trial(config)
        embedding = _name_in(self.model, self.model.get_input_embeddings())
        self._before = frozenset(
            name
            for name in self._outside(self.model)
            if f"{embedding}.".startswith(f"{name}.") or self._ran_before(name)
        )

    @property
    def before(self) -> NonLayerModules:
        """The frame with the modules before the layers."""
        return self._frame(lambda name: name in self._before)

    @property
    def after(self) -> NonLayerModules:
        """The frame with the modules after the layers."""
        return self._frame(lambda name: name not in self._before)

    @property
    def around(self) -> NonLayerModules:
        """The frame without any module that has parameters; buffers are in place."""
        return self._around

    def _ran_before(self, name: str) -> bool:
        return self._around.probe.before.get(name, False)

    def _outside(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """The modules next to the list of layers and next to those that the list is in, by name."""
        path = self.path.split(".")
        around = [".".join(path[:depth]) for depth in range(len(path) + 1)]
        return {
            f"{parent}.{name}" if parent else name: child
            for parent in around[:-1]
            for name, child in model.get_submodule(parent).named_children()
            if (f"{parent}.{name}" if parent else name) not in around
        }

    def _frame(self, held: Callable[[str], bool]) -> NonLayerModules:
        """A copy that has the modules outside of the list of layers that are `held`."""
        model = copy.deepcopy(self.model)
        probe = next(module for module in model.modules() if isinstance(module, _LayerProbe)).probe
        for name, child in self._outside(model).items():
            if not held(name) and any(True for _ in child.parameters()):
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, _MissingModule(name, probe))
        return NonLayerModules(model, probe)

    def _trial(self, config: Mapping[str, Any]) -> NonLayerModules:
        """The frame without parameters, once it has shown how layers are called."""
        x = torch.full((*TRIAL_SHAPE, self.model.get_input_embeddings().weight.shape[-1]), torch.nan)
        why = ""
        for self._probe.tuple_size in range(3):
            frame = self._frame(lambda _: False)
            for name, _ in frame.causal.named_parameters():
                raise _refusal(config, f"'{name}' belongs to no module next to or in them")
            materialise(frame.causal, self.model, prefix="", seed=0, dtype=torch.float32)
            frame.causal.eval()
            try:
                given = frame.around_layers(x)
            except (
                AttributeError,
                IndexError,
                KeyError,
                NotImplementedError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:
                why = _first_line(error)
                continue
            if len(given) != len(self.layers) or any(g.hidden is not given[0].hidden for g in given):
                why = "what it does between layers is not theirs alone"
            elif given[0].hidden.shape != x.shape or not all(
                _is_constant([*g.arguments, *g.named.values()]) for g in given
            ):
                why = "its layers need more of what came before than hidden states"
            else:
                return frame
        raise _refusal(config, why)


def _list_of_layers(model: Any, config: Mapping[str, Any]) -> tuple[str, nn.ModuleList]:
    """The name of the one list of modules that lies in the base model and in no other list, and the list."""
    base: nn.Module = base_of(model)
    start = _name_in(model, base)
    lists = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    }
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if len(outer) != 1:
        raise _refusal(config, "its base model has no single list of layers")
    ((name, layers),) = outer.items()
    if len(layers) != ModelConfig.from_hf(config).layers:
        raise _refusal(
            config, f"it has {len(layers)} layers in its list, and debubble reads {ModelConfig.from_hf(config).layers}"
        )
    return f"{start}.{name}" if start else name, layers


def _freeze_buffers(model: Any) -> Iterator[str]:
    """Make parameters that nothing steps of the buffers that a checkpoint has; those that keep their dtype, by name."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in [name for name in model.state_dict() if name not in parameters]:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        constant = nn.Parameter(module._buffers.pop(own), requires_grad=False)
        module.register_parameter(own, constant)
        if not constant.is_floating_point() or kept & {*name.split(".")}:
            yield name


def _name_in(model: Any, part: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is part)


def _is_constant(value: Any) -> bool:
    """Tell whether the value follows from shapes alone: what is made of the trial's hidden states is NaN like them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_constant, value))
    if isinstance(value, Tensor):
        return not (value.is_floating_point() and bool(value.isnan().any()))
    return value is None or isinstance(value, (bool, int, float, str))


def _refusal(config: Mapping[str, Any], why: str) -> InputError:
    return InputError(f"transformers' '{config.get('model_type')}' cannot be divided between its layers: {why}.")


def _import(config: Mapping[str, Any]) -> Any:
    """The module transformers.  Raises InputError if it is missing or old."""
    family = str(config.get("model_type"))
    try:
        # transformers puts another module in its place while it is imported: an import statement of a second thread
        # would wait for the first one and then have the module from before.
        transformers = import_module("transformers")
    except ImportError as error:
        raise InputError(f"'{family}' runs with transformers' modules: pip install 'debubble[hf]'.") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise InputError(f"'{family}' runs with the modules of transformers 5 or later: update it.")
    return transformers


def complete_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with transformers' defaults for what it leaves out.  Raises InputError if there is no such family."""
    entries: Mapping[str, Any] = _read_config(_import(config), config).to_dict()
    return entries


def _read_config(transformers: Any, config: Mapping[str, Any]) -> Any:
    family = str(config.get("model_type"))
    try:
        return type(transformers.AutoConfig.for_model(family)).from_dict(without_kernels(config))
    except ValueError as error:
        raise _no_model(family, error) from error


def ignored_names(config: Mapping[str, Any]) -> Sequence[str]:
    """Expressions for names in checkpoints of a family to which transformers pays no heed."""
    if not ModelConfig.from_hf(config).whole_layers:
        return ()
    transformers = _import(config)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(_read_config(transformers, config))]
    return kind._keys_to_ignore_on_load_unexpected or ()


def on_meta(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> Any:
    """Make the causal model of a config on the meta device, by transformers, to run in this dtype.

    Raises InputError if there is none.
    """
    family, transformers = str(config.get("model_type")), _import(config)
    if config.get("output_router_logits"):
        raise InputError(
            f"The runtime has no auxiliary loss for the routers of '{family}', which 'output_router_logits' asks for:"
            " set it to false."
        )
    if config.get("layerdrop"):
        raise InputError(
            f"A stage of '{family}' would run layers that 'layerdrop' skips at random in training: set it to 0."
        )
    try:
        read = _read_config(transformers, config)
        # Fused attention draws dropout's masks from torch's global generator and caps no scores; grouped products know
        # no fp64.
        eager = {
            "attn_implementation": bool(
                getattr(read, "attention_dropout", 0) or getattr(read, "attn_logit_softcapping", None)
            ),
            "experts_implementation": dtype is torch.float64,
        }
        chosen = {option: "eager" for option, needed in eager.items() if needed}
        with INITIALISING, torch.device("meta"), _ComputedValues():
            build: Any = transformers.AutoModelForCausalLM.from_config
            return build(read, dtype=torch.float32, **chosen)
    except (ImportError, ValueError) as error:
        raise _no_model(family, error) from error


class _ComputedValues(TorchFunctionMode):
    """A mode in which small tensors that a model computes while it is made have values, as buffers do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        made = function(*args, **kwargs)
        if function in _COMPUTED and kwargs.get("device") is None and made.numel() <= _MAX_COMPUTED_SIZE:
            return function(*args, **{**kwargs, "device": "cpu"})
        return made


_COMPUTED = frozenset((torch.arange, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros))
"""The functions that make tensors with values; linear layers and tables begin empty."""
_MAX_COMPUTED_SIZE = 2**22
"""Elements of the largest tensor that is computed: a causal mask of 2048 tokens."""


_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "use_kernels")
"""Entries by which transformers chooses kernels, which it may fetch from a hub."""


def without_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and those inside it, without the entries that choose kernels."""
    return {
        name: without_kernels(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _KERNELS
    }


def _no_model(family: str, error: Exception) -> InputError:
    return InputError(f"transformers builds no causal model of the type '{family}': {_first_line(error)}.")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].removesuffix(".")


def tied_names(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of the embedding's and the head's table, if they are one."""
    model = ModelConfig.from_hf(config)
    if model.whole_layers:
        return _tied_names_by_transformers(json.dumps(dict(config)))
    return (TABLE[model.is_gpt2], HEAD_TABLE) if model.tied else None


@lru_cache(maxsize=64)
def _tied_names_by_transformers(config: str) -> tuple[str, str] | None:
    """The tied names of a model that has to be made to know them: once for each config, as JSON."""
    return tables_of(on_meta(json.loads(config)))


def tables_of(model: Any) -> tuple[str, str] | None:
    """The names of the embedding's and of the head's table, if they are one."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    return (names[table], names[head]) if head.weight is table.weight else None
