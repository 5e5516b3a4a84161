"""Checks by peft's config that the adapters in a folder are for the plan's model.

Adapters of another model may have the same shapes, so shapes do not suffice.  peft itself is not imported, as that
takes as long as importing transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from debubble.files import decode_json
from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.runtime.models.lora import CONFIG, Adapters, is_adapter, plain_name

_LIBRARY = "transformers.models."


class _AutoMapping(msgspec.Struct):
    parent_library: str | None = None


class _ModelType(msgspec.Struct):
    """The entry of a model's config with its family."""

    model_type: str | None = None


class AdapterConfig(msgspec.Struct):
    """The entries of peft's config that identify the model and determine what adapters compute."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    auto_mapping: _AutoMapping | None = None
    base_model_name_or_path: str | None = None

    @staticmethod
    def load(folder: Path) -> AdapterConfig:
        """Read a folder's config.  Raises InputError if it is damaged."""
        try:
            return decode_json((folder / CONFIG).read_bytes(), AdapterConfig)
        except msgspec.DecodeError as error:
            raise InputError(f"{folder / CONFIG} is no config of peft's adapters: {error}.") from error

    @property
    def family(self) -> str | None:
        """Hugging Face's model type of the base model; None if it is not recorded."""
        library = "" if self.auto_mapping is None else self.auto_mapping.parent_library or ""
        if library.startswith(_LIBRARY):
            return library.removeprefix(_LIBRARY).partition(".")[0]
        config = Path(self.base_model_name_or_path or "") / "config.json"
        if not self.base_model_name_or_path or not config.is_file():
            return None
        try:
            return decode_json(config.read_bytes(), _ModelType).model_type
        except msgspec.DecodeError:
            return None

    def scaling_of(self, layer: str) -> float:
        """The scaling of the adapter on a linear layer, by peft's patterns."""
        rank, alpha = _matching(self.rank_pattern, layer, self.r), _matching(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def beyond_lora(self) -> str | None:
        """The entry that makes adapters other than plain LoRA; None for plain ones."""
        unusual = {
            "peft_type": self.peft_type != "LORA", "use_dora": self.use_dora, "bias": self.bias != "none",
            "modules_to_save": bool(self.modules_to_save),
        }  # fmt: skip
        return next((name for name, is_set in unusual.items() if is_set), None)


def _matching(pattern: Mapping[str, float] | None, layer: str, otherwise: float) -> float:
    """The value of the first pattern that matches a layer's name from its beginning or from a dot."""
    matches = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(matches, otherwise)


def with_family(config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A peft config that records the base model's family, in peft's own entry."""
    if config.get("auto_mapping"):
        return dict(config)
    family = _module(str(model.get("model_type")))
    of_model = {
        "base_model_class": next(iter(model.get("architectures") or []), None),
        "parent_library": f"{_LIBRARY}{family}.modeling_{family}",
    }
    return {**config, "auto_mapping": of_model}


def check_model(folder: Path, names: Iterable[str], model: ModelConfig) -> None:
    """Raise InputError if the adapters in a folder are not for the model.

    Args:
        folder: Folder written by peft.
        names: Parameters in its file.
        model: The plan's model.
    """
    config = AdapterConfig.load(folder)
    family = config.family
    if family is not None and _module(family) != _module(model.family):
        raise InputError(
            f"The adapters in {folder} are for a model of the family '{family}', and the plan's is '{model.family}':"
            " give adapters of this one."
        )
    if config.beyond_lora is not None:
        raise InputError(
            f"The runtime has plain LoRA alone, and the adapters in {folder} have another '{config.beyond_lora}'."
        )
    layers = [int(number) for name in names for number in re.findall(r"\.(?:layers|h)\.(\d+)\.", name)]
    if max(layers, default=-1) >= model.layers:
        raise InputError(
            f"The adapters in {folder} are for a model of at least {max(layers) + 1} layers, and the plan's has"
            f" {model.layers}: give adapters of this one."
        )


def check_adapters(folder: Path, names: Iterable[str], adapters: Adapters) -> None:
    """Raise InputError if the adapters in a folder are on other layers than the plan's, or have other scalings."""
    config = AdapterConfig.load(folder)
    targets = adapters.config.get("target_modules")
    there = [plain_name(name) for name in names]
    if isinstance(targets, list):
        layers = (name.partition(".lora_")[0] for name in there if is_adapter(name))
        foreign = next((layer for layer in layers if layer.rpartition(".")[2] not in targets), None)
        if foreign is not None:
            raise InputError(
                f"The adapters in {folder} have one on '{foreign}', where the plan has none: give `Pipeline` a"
                " PeftModel with them, or other adapters."
            )
    for layer, adapter in adapters.by_layer.items():
        scaling = config.scaling_of(layer)
        if not math.isclose(scaling, adapter.scaling, rel_tol=1e-6):
            raise InputError(
                f"The adapters in {folder} are scaled by {scaling:g} on '{layer}', and the plan's by"
                f" {adapter.scaling:g}: give `Pipeline` a PeftModel with them, or other adapters."
            )


def _module(family: str) -> str:
    """The name of transformers' module of a family; text models share that of the multimodal model."""
    return family.removesuffix("_text")
