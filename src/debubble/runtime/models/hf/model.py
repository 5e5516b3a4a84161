"""A causal model of transformers without its layers, which pass through stand-ins: what it does before, after, around.

The model is built on the meta device.  Its layers are the entries of the one list of modules among its base model's
children; its pipeline plan, or else the order of these children, says what comes before them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.runtime.models.hf.initialization import materialise
from debubble.runtime.models.hf.names import HEAD_TABLE, TABLE

TRIAL = 1, 4
"""Rows and tokens of the trial that shows how the model calls its layers."""


class LayerArguments(NamedTuple):
    """The arguments that the model gives a layer: the hidden states, and what it needs beside them."""

    hidden: Tensor
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


class ForwardProbe:
    """The model's forward, which notes what each layer is given and may replace what the last one returns."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.tupled = False
        """True if layers return their result as the first of a tuple."""
        self.given: list[LayerArguments] = []
        self.result: Tensor | None = None
        """The tensor that the last layer is to return; None: the one that the first is given."""

    def past(self, given: LayerArguments) -> Any:
        """Note a layer's arguments, and return what the model is to go on with in place of the layer's result."""
        self.given.append(given)
        replaced = self.result is not None and len(self.given) == self.layers
        y = self.result if replaced else given.hidden
        return (y,) if self.tupled else y


class _StandIn(nn.Module):
    """A module in a layer's place, with the plain attributes that the model may ask it for."""

    def __init__(self, layer: nn.Module, probe: ForwardProbe) -> None:
        super().__init__()
        self.probe = probe
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float)):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        return self.probe.past(LayerArguments(hidden_states, arguments, named))


class _Absent(nn.Module):
    """A module in the place of one that another unit has: passes its input on while the result is of no account."""

    def __init__(self, name: str, probe: ForwardProbe, *, before: bool) -> None:
        super().__init__()
        self.name, self.probe, self.before = name, probe, before

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.before == bool(self.probe.given):
            raise ValueError(f"it uses '{self.name}' on both sides of its layers")
        return x


@dataclass(frozen=True)
class Frame:
    """The model with stand-ins for its layers, and perhaps for what comes before or after them."""

    causal: Any
    probe: ForwardProbe

    def up_to_layers(self, tokens: Tensor) -> Tensor:
        """The hidden states that the first layer is given for these tokens."""
        return self._arguments(input_ids=tokens)[0].hidden

    def from_layers(self, x: Tensor) -> Tensor:
        """The logits, if the last layer returns `x`."""
        self.probe.result = x
        logits: Tensor = self.causal(inputs_embeds=x.detach(), use_cache=False).logits
        self._take_arguments()
        return logits

    def around_layers(self, x: Tensor) -> Sequence[LayerArguments]:
        """The arguments that each layer is given, if `x` comes from the embedding."""
        return self._arguments(inputs_embeds=x)

    def _arguments(self, **inputs: Tensor) -> list[LayerArguments]:
        self.causal.base_model(**inputs, use_cache=False)
        return self._take_arguments()

    def _take_arguments(self) -> list[LayerArguments]:
        given, self.probe.given, self.probe.result = self.probe.given, [], None
        return given


class ModelParts:
    """The parts of a model that make up its units.  Raises InputError if it cannot be divided between its layers."""

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> None:
        self.model = on_meta(config, dtype=dtype)
        """Whole, on the meta device, with stand-ins for its layers."""
        base = self.model.base_model
        lists = {name: child for name, child in base.named_children() if isinstance(child, nn.ModuleList)}
        if len(lists) != 1:
            raise _refusal(config, "its base model has no single list of layers")
        own, self.layers = next(iter(lists.items()))
        self.path = next(name for name, module in self.model.named_modules() if module is self.layers)
        """The name of the list of layers."""
        self.tables = tables_of(self.model)
        self._check_state(config)
        order = [*(getattr(base.config, "base_model_pp_plan", None) or dict(base.named_children()))]
        self._before = set(order[: order.index(own)])
        self._probe = ForwardProbe(len(self.layers))
        setattr(base, own, nn.ModuleList(_StandIn(layer, self._probe) for layer in self.layers))
        self._around = self._trial(config)

    @property
    def before(self) -> Frame:
        """The frame with the modules before the layers."""
        return self._frame(lambda before: before)

    @property
    def after(self) -> Frame:
        """The frame with the modules after the layers."""
        return self._frame(lambda before: not before)

    @property
    def around(self) -> Frame:
        """The frame without any module that has parameters; buffers are in place."""
        return self._around

    def _frame(self, held: Callable[[bool], bool]) -> Frame:
        """A copy that has what comes before the layers, or after them, if it is `held`."""
        model = copy.deepcopy(self.model)
        base = model.base_model
        probe = next(module for module in model.modules() if isinstance(module, _StandIn)).probe
        for parent in (model, base):
            for name, child in list(parent.named_children()):
                before = parent is base and name in self._before
                if child is not base and not held(before) and any(True for _ in child.parameters()):
                    setattr(parent, name, _Absent(name, probe, before=before))
        return Frame(model, probe)

    def _check_state(self, config: Mapping[str, Any]) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        beside = [name for name in self.model.state_dict() if name not in parameters]
        if beside:
            raise _refusal(config, f"its '{beside[0]}' is state that no optimizer steps")

    def _trial(self, config: Mapping[str, Any]) -> Frame:
        """The frame without parameters, once it has shown how layers are called."""
        x = torch.full((*TRIAL, self.model.config.hidden_size), torch.nan)
        why = ""
        for self._probe.tupled in (False, True):
            frame = self._frame(lambda _: False)
            for name, _ in frame.causal.named_parameters():
                raise _refusal(config, f"'{name}' belongs to no module beside or in them")
            materialise(frame.causal, self.model, prefix="", seed=0, dtype=torch.float32)
            frame.causal.eval()
            try:
                given = frame.around_layers(x)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
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


def _is_constant(value: Any) -> bool:
    """Tell whether the value follows from shapes alone: what is made of the trial's hidden states is NaN like them."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_constant, value))
    if isinstance(value, Tensor):
        return not (value.is_floating_point() and bool(value.isnan().any()))
    return value is None or isinstance(value, (bool, int, float, str))


def _refusal(config: Mapping[str, Any], why: str) -> InputError:
    return InputError(f"transformers' '{config.get('model_type')}' cannot be divided between its layers: {why}.")


def on_meta(config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> Any:
    """Make the causal model of a config on the meta device, by transformers, to run in this dtype.

    Raises InputError if there is none.
    """
    family = str(config.get("model_type"))
    try:
        # transformers puts another module in its place while it is imported: an import statement of a second thread
        # would wait for the first one and then have the module from before.
        transformers = import_module("transformers")
    except ImportError as error:
        raise InputError(f"'{family}' runs with transformers' modules: pip install 'debubble[hf]'.") from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise InputError(f"'{family}' runs with the modules of transformers 5 or later: update it.")
    if config.get("output_router_logits"):
        raise InputError(
            f"The runtime has no auxiliary loss for the routers of '{family}', which 'output_router_logits' asks for:"
            " set it to false."
        )
    try:
        read = type(transformers.AutoConfig.for_model(family)).from_dict(dict(config))
        # Fused attention draws dropout's masks from torch's global generator; grouped products know no fp64.
        eager = {
            "attn_implementation": bool(getattr(read, "attention_dropout", 0)),
            "experts_implementation": dtype is torch.float64,
        }
        chosen = {option: "eager" for option, needed in eager.items() if needed}
        with torch.device("meta"):
            build: Any = transformers.AutoModelForCausalLM.from_config
            return build(read, dtype=torch.float32, **chosen)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"transformers builds no causal model of the type '{family}': {_first_line(error)}."
        ) from error


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
    """The same of a model that has to be made to know it: once for each config, as JSON."""
    return tables_of(on_meta(json.loads(config)))


def tables_of(model: Any) -> tuple[str, str] | None:
    """The names of the embedding's and of the head's table, if they are one."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    return (names[table], names[head]) if head.weight is table.weight else None
