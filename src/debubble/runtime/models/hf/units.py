"""Any causal model of transformers as units of its own modules: embedding, full layers, head.

The other arguments of layers (masks, positions) are recorded from a forward of the model, and cached for recent shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from debubble.ir import InputError, PlannedUnit
from debubble.runtime.distributed.cuts import Cut
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.compilation import Compiler
from debubble.runtime.models.hf.division import divide_module, modules_with_style
from debubble.runtime.models.hf.initialization import materialise
from debubble.runtime.models.hf.model import ModelParts, NonLayerModules
from debubble.runtime.models.loss import cross_entropy, divided_cross_entropy
from debubble.runtime.models.modules import ModuleUnit
from debubble.runtime.models.units import UnitModule, check_whole_recomputation

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]

MAX_CACHED_SHAPES = 2
"""Shapes of hidden states for which masks and positions are cached; a mask has up to length^2 elements."""


class _HfUnit(ModuleUnit):
    """A unit of transformers' modules, with the model's `constants`."""

    def __init__(self, module: nn.Module, constants: Iterable[str], *, prefix: str, salt: int) -> None:
        super().__init__(module, prefix=prefix, salt=salt)
        self.constants = frozenset(constants)

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        cuts = super().divide(group, made)
        for path in (*self.columns, *self.rows):
            divide_module(self.get_submodule(path), group, by_rows=path in self.rows)
        return cuts


class _HfEnd(_HfUnit):
    """The model's forward before its first layer or after its last one."""

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile the loss only."""
        UnitModule.compile_functions(self, compiled)


class HfEmbedding(_HfEnd):
    """The model before its first layer."""

    def __init__(self, parts: ModelParts) -> None:
        frame = parts.before
        super().__init__(frame.causal, parts.constants, prefix="", salt=0)
        self.frame = frame
        self.columns = (_path(frame.causal, frame.causal.get_input_embeddings()),)

    def call(self, x: Tensor) -> Tensor:
        """Map tokens [rows, length] to the first layer's hidden states."""
        return self.frame.up_to_layers(x)


class HfLayer(_HfUnit):
    """One layer of the model."""

    def __init__(self, parts: ModelParts, layer: int, layer_context: LayerContext) -> None:
        super().__init__(parts.layers[layer], parts.constants, prefix=f"{parts.path}.{layer}.", salt=layer + 1)
        self.layer, self.layer_context = layer, layer_context
        self.columns, self.rows = (
            tuple(f"module.{name}" for name in modules_with_style(parts, style)) for style in ("colwise", "rowwise")
        )

    def call(self, x: Tensor) -> Tensor:
        """Map hidden states [rows, length, hidden] to the layer's output, the first entry if it returns a tuple."""
        arguments, named = self.layer_context.arguments_of(self.layer, x)
        y = self.module(x, *arguments, **named)
        # The trial forward has shown that the model does not use the other entries.
        hidden: Tensor = y[0] if isinstance(y, tuple) else y
        return hidden

    def attach_ledger(self, ledger: Ledger) -> None:
        """Exclude the unit's parameters and buffers, and the cached arguments, from the ledger."""
        super().attach_ledger(ledger)
        self.layer_context.ledger = ledger


class HfHead(_HfEnd):
    """The model after its last layer, and the loss."""

    def __init__(self, parts: ModelParts) -> None:
        frame = parts.after
        super().__init__(frame.causal, parts.constants, prefix="", salt=len(parts.layers) + 1)
        self.loss = cross_entropy
        self.frame = frame
        self.columns = (_path(frame.causal, frame.causal.get_output_embeddings()),)

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        """Shard the unit, and compute the loss from logits that are sharded by vocabulary."""
        vocab = len(self.frame.causal.get_output_embeddings().weight)
        self.loss = partial(divided_cross_entropy, group=group, vocab=vocab)
        return super().divide(group, made)

    def call(self, x: Tensor) -> Tensor:
        """Map the last layer's output [rows, length, hidden] to logits [rows, length, vocab]."""
        return self.frame.from_layers(x)


def _path(model: nn.Module, submodule: nn.Module) -> str:
    return next(f"module.{name}" for name, module in model.named_modules() if module is submodule)


class LayerContext:
    """The arguments of a model's layers besides hidden states, cached for recent shapes of these."""

    def __init__(self, frame: NonLayerModules) -> None:
        self._frame = frame
        self._cached: dict[tuple[torch.Size, torch.dtype, torch.device], list[Arguments]] = {}
        self.ledger = Ledger()
        """The device's ledger, which does not count cached arguments."""

    def arguments_of(self, layer: int, x: Tensor) -> Arguments:
        """A layer's other positional and keyword arguments, for hidden states of the shape of `x`."""
        key = x.shape, x.dtype, x.device
        if key not in self._cached:
            self._frame.causal.to(x.device)
            with torch.no_grad():
                calls = [(call.arguments, call.named) for call in self._frame.around_layers(x.detach())]
            if len(self._cached) >= MAX_CACHED_SHAPES:
                self.ledger.include(_tensors_of(self._cached.pop(next(iter(self._cached)))))
            self.ledger.exclude(_tensors_of(calls))
            self._cached[key] = calls
        return self._cached[key][layer]


def _tensors_of(calls: Sequence[Arguments]) -> list[Tensor]:
    return [t for arguments, named in calls for t in _tensors((*arguments, *named.values()))]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    nested = [v for value in values for v in (_tensors(value) if isinstance(value, (tuple, list)) else [value])]
    return [value for value in nested if isinstance(value, Tensor)]


def build_hf_stage(
    config: Mapping[str, Any], units: Sequence[PlannedUnit], *, seed: int, dtype: torch.dtype
) -> list[ModuleUnit]:
    """Build the units of one stage with initial weights; the rest of the model remains on the meta device.

    Raises InputError if the model cannot be divided into these units.
    """
    parts = ModelParts(config, dtype=dtype)
    layer_context = LayerContext(parts.around)
    built = [_unit(parts, planned, layer_context) for planned in units]
    for unit in built:
        materialise(unit.module, parts.model, prefix=unit.prefix, seed=seed, dtype=dtype)
        if isinstance(unit, HfHead) and parts.tables is not None:
            table = copy.deepcopy(parts.model.get_input_embeddings())
            materialise(table, parts.model, prefix=parts.tables[0].removesuffix("weight"), seed=seed, dtype=dtype)
            unit.hf_parameters()[parts.tables[1]].data = table.weight.data
    return built


def _unit(parts: ModelParts, planned: PlannedUnit, layer_context: LayerContext) -> ModuleUnit:
    check_whole_recomputation([planned], "transformers' modules")
    match planned.type, planned.layer:
        case "embedding", _:
            return HfEmbedding(parts)
        case "layer", int(layer) if layer < len(parts.layers):
            return HfLayer(parts, layer, layer_context)
        case "head", _:
            return HfHead(parts)
        case _:
            raise InputError(
                f"The model has no unit of type '{planned.type}' and layer {planned.layer}: make the plan again."
            )
