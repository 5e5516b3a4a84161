"""Any causal model of transformers as units of its own modules: embedding, whole layers, head.

Layers get what the model gives them after the hidden states (masks, positions), noted for the newest shapes.
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
from debubble.runtime.models.hf.division import divide_module, planned
from debubble.runtime.models.hf.initialization import materialise
from debubble.runtime.models.hf.model import ModelParts, NonLayerModules
from debubble.runtime.models.loss import cross_entropy, divided_cross_entropy
from debubble.runtime.models.modules import ModuleUnit
from debubble.runtime.models.units import UnitModule, check_whole_recomputation

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]

NOTED_SHAPES = 2
"""Shapes of hidden states whose masks and positions stay: a mask has up to as many numbers as a length has squared."""


class _HfUnit(ModuleUnit):
    """A part of the model, which has `constants` of it."""

    def __init__(self, module: nn.Module, constants: Iterable[str], *, prefix: str, salt: int) -> None:
        super().__init__(module, prefix=prefix, salt=salt)
        self.constants = frozenset(constants)

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        cuts = super().divide(group, made)
        for path in (*self.columns, *self.rows):
            divide_module(self.get_submodule(path), group, by_rows=path in self.rows)
        return cuts


class _HfEnd(_HfUnit):
    """The model's own forward before its first layer or after its last, which stops where others' parts begin."""

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile the loss alone."""
        UnitModule.compile_functions(self, compiled)


class HfEmbedding(_HfEnd):
    """The part of the model before its first layer."""

    def __init__(self, parts: ModelParts) -> None:
        frame = parts.before
        super().__init__(frame.causal, parts.constants, prefix="", salt=0)
        self.frame = frame
        self.columns = (_path(frame.causal, frame.causal.get_input_embeddings()),)

    def call(self, x: Tensor) -> Tensor:
        """Map tokens [rows, length] to the hidden states that the first layer gets."""
        return self.frame.up_to_layers(x)


class HfLayer(_HfUnit):
    """One layer."""

    def __init__(self, parts: ModelParts, layer: int, layer_context: LayerContext) -> None:
        super().__init__(parts.layers[layer], parts.constants, prefix=f"{parts.path}.{layer}.", salt=layer + 1)
        self.layer, self.layer_context = layer, layer_context
        self.columns, self.rows = (
            tuple(f"module.{name}" for name in planned(parts, how)) for how in ("colwise", "rowwise")
        )

    def call(self, x: Tensor) -> Tensor:
        """Map hidden states [rows, length, hidden] to the layer's result, the first of a tuple if it returns one."""
        arguments, named = self.layer_context.of(self.layer, x)
        y = self.module(x, *arguments, **named)
        # What some layers return in addition, the model has shown not to need.
        hidden: Tensor = y[0] if isinstance(y, tuple) else y
        return hidden

    def attach_ledger(self, ledger: Ledger) -> None:
        """Tell the ledger what is no activation, and pass the ledger on to the layer's surroundings."""
        super().attach_ledger(ledger)
        self.layer_context.ledger = ledger


class HfHead(_HfEnd):
    """The part of the model after its last layer, and the loss."""

    def __init__(self, parts: ModelParts) -> None:
        frame = parts.after
        super().__init__(frame.causal, parts.constants, prefix="", salt=len(parts.layers) + 1)
        self.loss = cross_entropy
        self.frame = frame
        self.columns = (_path(frame.causal, frame.causal.get_output_embeddings()),)

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        """Divide the unit as others are, and compute the loss from logits that are divided among the ranks."""
        vocab = len(self.frame.causal.get_output_embeddings().weight)
        self.loss = partial(divided_cross_entropy, group=group, vocab=vocab)
        return super().divide(group, made)

    def call(self, x: Tensor) -> Tensor:
        """Map the last layer's result [rows, length, hidden] to logits [rows, length, vocab]."""
        return self.frame.from_layers(x)


def _path(model: nn.Module, part: nn.Module) -> str:
    return next(f"module.{name}" for name, module in model.named_modules() if module is part)


class LayerContext:
    """The arguments that a model gives its layers after the hidden states, noted for the newest shapes of these."""

    def __init__(self, frame: NonLayerModules) -> None:
        self._frame = frame
        self._noted: dict[tuple[torch.Size, torch.dtype, torch.device], list[Arguments]] = {}
        self.ledger = Ledger()
        """The device's bytes that all micro-batches share, which are no activation of any."""

    def of(self, layer: int, x: Tensor) -> Arguments:
        """The layer's arguments after hidden states such as `x`: in order, and by name."""
        key = x.shape, x.dtype, x.device
        if key not in self._noted:
            self._frame.causal.to(x.device)
            with torch.no_grad():
                noted = [(given.arguments, given.named) for given in self._frame.around_layers(x.detach())]
            if len(self._noted) >= NOTED_SHAPES:
                self.ledger.include(_tensors_of(self._noted.pop(next(iter(self._noted)))))
            self.ledger.exclude(_tensors_of(noted))
            self._noted[key] = noted
        return self._noted[key][layer]


def _tensors_of(noted: Sequence[Arguments]) -> list[Tensor]:
    return [t for arguments, named in noted for t in _tensors((*arguments, *named.values()))]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    nested = [v for value in values for v in (_tensors(value) if isinstance(value, (tuple, list)) else [value])]
    return [value for value in nested if isinstance(value, Tensor)]


def build_hf_stage(
    config: Mapping[str, Any], units: Sequence[PlannedUnit], *, seed: int, dtype: torch.dtype
) -> list[ModuleUnit]:
    """The units of one stage with their initial weights; the rest of the model never leaves the meta device.

    Raises InputError if the model cannot be divided so, or a unit is no part of it.
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
