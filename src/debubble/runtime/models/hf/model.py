"""Divides a causal model of transformers into its layers and the modules before and after them.

The model is built on the meta device, with probes in place of its layers, which are the entries of the only module list
in its base model.  A trial forward shows which of the other modules run before the layers and which after.
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
"""Rows and tokens of the trial forward."""


class LayerArguments(NamedTuple):
    """The arguments of a layer's call: hidden states, and other positional and keyword arguments."""

    hidden: Tensor
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


class ForwardProbe:
    """Records the calls of layers in a forward of the model, and may replace the last layer's result."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.tuple_size = 0
        """Size of the tuples that layers return, with hidden states first; 0: they return a tensor."""
        self.layer_calls: list[LayerArguments] = []
        self.embedded: Tensor | None = None
        """The hidden states that the model gets instead of tokens."""
        self.result: Tensor | None = None
        """The tensor that the last layer returns; None: its input."""
        self.before: dict[str, bool] = {}
        """Name of a missing module -> True if it runs before the layers."""

    def call_layer(self, call: LayerArguments) -> Any:
        """Record a layer's call, and return the result of its probe."""
        self.layer_calls.append(call)
        replaced = self.result is not None and len(self.layer_calls) == self.layers
        y = self.result if replaced else call.hidden
        return (y, *[None] * (self.tuple_size - 1)) if self.tuple_size else y

    def call_missing(self, name: str, x: Any) -> Any:
        """Record on which side of the layers a missing module runs, and return a placeholder for its result."""
        before = not self.layer_calls
        if self.before.setdefault(name, before) != before:
            raise ValueError(f"it uses '{name}' on both sides of its layers")
        return self.embedded if before else x


class _LayerProbe(nn.Module):
    """Replaces a layer, with the layer's plain attributes, which the model may read."""

    def __init__(self, layer: nn.Module, probe: ForwardProbe) -> None:
        super().__init__()
        self.probe = probe
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float)):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        return self.probe.call_layer(LayerArguments(hidden_states, arguments, named))


class _MissingModule(nn.Module):
    """Replaces a module that is in another unit, and whose result is not used."""

    def __init__(self, name: str, probe: ForwardProbe) -> None:
        super().__init__()
        self.name, self.probe = name, probe

    def forward(self, x: Any = None, *_: Any, **__: Any) -> Any:
        return self.probe.call_missing(self.name, x)


@dataclass(frozen=True)
class NonLayerModules:
    """The model with probes for its layers, and without the modules before or after them, or both."""

    causal: Any
    probe: ForwardProbe

    def up_to_layers(self, tokens: Tensor) -> Tensor:
        """The input of the first layer for these tokens."""
        return self._layer_calls(input_ids=tokens)[0].hidden

    def from_layers(self, x: Tensor) -> Tensor:
        """The logits for `x`, the output of the last layer."""
        self.probe.result, self.probe.embedded = x, _unused(x)
        logits: Tensor = self.causal(inputs_embeds=self.probe.embedded, use_cache=False).logits
        self._take_layer_calls()
        return logits

    def around_layers(self, x: Tensor) -> Sequence[LayerArguments]:
        """The arguments of every layer for hidden states of the shape of `x`."""
        self.probe.embedded = _unused(x)
        return self._layer_calls(inputs_embeds=self.probe.embedded)

    def _layer_calls(self, **inputs: Tensor) -> list[LayerArguments]:
        base_of(self.causal)(**inputs, use_cache=False)
        return self._take_layer_calls()

    def _take_layer_calls(self) -> list[LayerArguments]:
        calls, self.probe.layer_calls, self.probe.result, self.probe.embedded = self.probe.layer_calls, [], None, None
        return calls


def _unused(x: Tensor) -> Tensor:
    """Placeholder hidden states, which a model may change in place: zeros, or NaN where x is."""
    return x.detach() * 0


def base_of(causal: Any) -> Any:
    """The base model of a causal model, without its head."""
    if causal.base_model is not causal:
        return causal.base_model
    inner = [child for child in causal.children() if hasattr(child, "base_model")]
    return inner[0] if len(inner) == 1 else causal


class ModelParts:
    """A model divided into units at its layers.  Raises InputError if that is impossible."""

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> None:
        self.model = on_meta(config, dtype=dtype)
        """The full model on the meta device, with probes for its layers and constants as frozen parameters."""
        self.constants = frozenset(_freeze_buffers(self.model))
        """Names of constants that keep their dtype, whatever the run's."""
        self.path, self.layers = _list_of_layers(self.model, config)
        """The name of the list of layers, and the list."""
        self.tables = tables_of(self.model)
        self._before: frozenset[str] = frozenset()
        self._probe = ForwardProbe(len(self.layers))
        parent, _, attribute = self.path.rpartition(".")
        probes = nn.ModuleList(_LayerProbe(layer, self._probe) for layer in self.layers)
        setattr(self.model.get_submodule(parent), attribute, probes)
        self._around = self._trial(config)
        embedding = _name_in(self.model, self.model.get_input_embeddings())
        self._before = frozenset(
            name
            for name in self._outside(self.model)
            if f"{embedding}.".startswith(f"{name}.") or self._ran_before(name)
        )

    @property
    def before(self) -> NonLayerModules:
        """The model with the modules before the layers."""
        return self._frame(lambda name: name in self._before)

    @property
    def after(self) -> NonLayerModules:
        """The model with the modules after the layers."""
        return self._frame(lambda name: name not in self._before)

    @property
    def around(self) -> NonLayerModules:
        """The model without modules that have parameters, but with buffers."""
        return self._around

    def _ran_before(self, name: str) -> bool:
        return self._around.probe.before.get(name, False)

    def _outside(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """The siblings of the list of layers and of its ancestors, by name."""
        path = self.path.split(".")
        around = [".".join(path[:depth]) for depth in range(len(path) + 1)]
        return {
            f"{parent}.{name}" if parent else name: child
            for parent in around[:-1]
            for name, child in model.get_submodule(parent).named_children()
            if (f"{parent}.{name}" if parent else name) not in around
        }

    def _frame(self, included: Callable[[str], bool]) -> NonLayerModules:
        """A copy with only the `included` modules of those outside the list of layers."""
        model = copy.deepcopy(self.model)
        probe = next(module for module in model.modules() if isinstance(module, _LayerProbe)).probe
        for name, child in self._outside(model).items():
            if not included(name) and any(True for _ in child.parameters()):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, _MissingModule(name, probe))
        return NonLayerModules(model, probe)

    def _trial(self, config: Mapping[str, Any]) -> NonLayerModules:
        """The model without parameters, after a trial forward with NaN that shows how it calls its layers."""
        x = torch.full((*TRIAL_SHAPE, self.model.get_input_embeddings().weight.shape[-1]), torch.nan)
        why = ""
        for self._probe.tuple_size in range(3):
            frame = self._frame(lambda _: False)
            for name, _ in frame.causal.named_parameters():
                raise _refusal(config, f"'{name}' belongs to no module next to or in them")
            materialise(frame.causal, self.model, prefix="", seed=0, dtype=torch.float32)
            frame.causal.eval()
            try:
                calls = frame.around_layers(x)
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
            if len(calls) != len(self.layers) or any(call.hidden is not calls[0].hidden for call in calls):
                why = "what it does between layers is not theirs alone"
            elif calls[0].hidden.shape != x.shape or not all(
                _is_constant([*call.arguments, *call.named.values()]) for call in calls
            ):
                why = "its layers need more of what came before than hidden states"
            else:
                return frame
        raise _refusal(config, why)


def _list_of_layers(model: Any, config: Mapping[str, Any]) -> tuple[str, nn.ModuleList]:
    """The only module list in the base model that is not nested in another one, with its name."""
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
    """Make persistent buffers frozen parameters, and yield the names of those that keep their dtype."""
    fp32_modules = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in [name for name in model.state_dict() if name not in parameters]:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        constant = nn.Parameter(module._buffers.pop(attribute), requires_grad=False)
        module.register_parameter(attribute, constant)
        if not constant.is_floating_point() or fp32_modules & {*name.split(".")}:
            yield name


def _name_in(model: Any, submodule: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is submodule)


def _is_constant(value: Any) -> bool:
    """Tell whether a value depends on shapes only: values computed from the trial's hidden states are NaN."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_constant, value))
    if isinstance(value, Tensor):
        return not (value.is_floating_point() and bool(value.isnan().any()))
    return value is None or isinstance(value, (bool, int, float, str))


def _refusal(config: Mapping[str, Any], why: str) -> InputError:
    return InputError(f"transformers' '{config.get('model_type')}' cannot be divided between its layers: {why}.")


def _import(config: Mapping[str, Any]) -> Any:
    """Import transformers.  Raises InputError if it is missing or too old."""
    family = str(config.get("model_type"))
    try:
        # transformers replaces its module in sys.modules during the import: an import statement in a second thread
        # would wait for the first and then get the old module.
        transformers = import_module("transformers")
    except ImportError as error:
        raise InputError(f"'{family}' runs with transformers' modules: pip install 'debubble[hf]'.") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise InputError(f"'{family}' runs with the modules of transformers 5 or later: update it.")
    return transformers


def complete_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config completed by transformers' defaults.  Raises InputError if there is no such family."""
    entries: Mapping[str, Any] = _read_config(_import(config), config).to_dict()
    return entries


def _read_config(transformers: Any, config: Mapping[str, Any]) -> Any:
    family = str(config.get("model_type"))
    try:
        return type(transformers.AutoConfig.for_model(family)).from_dict(without_kernels(config))
    except ValueError as error:
        raise _no_model(family, error) from error


def ignored_names(config: Mapping[str, Any]) -> Sequence[str]:
    """Regular expressions for tensors in a family's checkpoints that transformers ignores."""
    if not ModelConfig.from_hf(config).whole_layers:
        return ()
    transformers = _import(config)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(_read_config(transformers, config))]
    return kind._keys_to_ignore_on_load_unexpected or ()


def on_meta(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> Any:
    """Build transformers' causal model of a config on the meta device, for a run in this dtype.

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
        # Fused attention draws dropout masks from torch's global generator and cannot cap scores; grouped products have
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
    """A mode in which small tensors that a model's constructor computes, such as buffers, are on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        made = function(*args, **kwargs)
        if function in _COMPUTED and kwargs.get("device") is None and made.numel() <= _MAX_COMPUTED_SIZE:
            return function(*args, **{**kwargs, "device": "cpu"})
        return made


_COMPUTED = frozenset((torch.arange, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros))
"""Functions that make tensors with values; parameters are made empty."""
_MAX_COMPUTED_SIZE = 2**22
"""Largest number of elements of such a tensor: a causal mask of 2048 tokens."""


_KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "use_kernels")
"""Entries by which transformers selects kernels, which it may download."""


def without_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and nested ones, without the entries that select kernels."""
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
    """The names of the embedding's and the head's table, if they are tied."""
    model = ModelConfig.from_hf(config)
    if model.whole_layers:
        return _tied_names_by_transformers(json.dumps(dict(config)))
    return (TABLE[model.is_gpt2], HEAD_TABLE) if model.tied else None


@lru_cache(maxsize=64)
def _tied_names_by_transformers(config: str) -> tuple[str, str] | None:
    """The tied names of a model, which has to be built to know them; cached by the config as JSON."""
    return tables_of(on_meta(json.loads(config)))


def tables_of(model: Any) -> tuple[str, str] | None:
    """The names of a model's embedding and head tables, if they are tied."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    return (names[table], names[head]) if head.weight is table.weight else None
