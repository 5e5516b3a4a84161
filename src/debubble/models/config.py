"""A model as described by its Hugging Face config, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from debubble.argument_types import with_checked_types
from debubble.models.architecture import Architecture
from debubble.models.entries import Entries, read_entries
from debubble.models.families import read_architecture


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """A causal language model: Llama-like, GPT-2 (`positions` set), or with other token mixers."""

    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The Hugging Face config that it was read from, unchanged."""

    @staticmethod
    @with_checked_types()
    def from_hf(source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`.

        Equal contents are parsed once.

        Args:
            source: The file, a folder with one, or its content.

        Raises:
            InputError: It is not a config, incomplete or inconsistent, or has layers that debubble does not know.
        """
        if not isinstance(source, Mapping):
            entries = read_entries(Path(source))
            return _with_config(read_architecture(entries), entries.entries)
        try:
            content = json.dumps(source)
        except (TypeError, ValueError, RecursionError):
            return _with_config(read_architecture(Entries(source, _CONTENT)), source)
        return _with_config(_parse(content), source)


_CONTENT = "The config"
"""The name in messages of a config that is not a file."""


@lru_cache(maxsize=64)
def _parse(content: str) -> Architecture:
    return read_architecture(Entries(json.loads(content), _CONTENT))


def _with_config(architecture: Architecture, config: Mapping[str, Any]) -> ModelConfig:
    values = {f.name: getattr(architecture, f.name) for f in fields(architecture)}
    return ModelConfig(**values, config=dict(config))
