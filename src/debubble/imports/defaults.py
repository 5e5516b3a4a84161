"""Defaults of the frameworks for settings that a configuration file lacks.

A Primus experiment overrides the base configurations of its trainer and model, a torchtitan TOML file the fields of
JobConfig, and a Megatron-Bridge file a recipe.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Defaults:
    """A framework's defaults.

    Attributes:
        source: Where they come from, such as `Megatron-LM`.
        values: Setting -> value, without settings that are off or that equal the importer's fallback.
    """

    source: str
    values: Mapping[str, Any] = field(default_factory=dict)


@cache
def framework_defaults(framework: str) -> Mapping[str, Any]:
    """The `defaults.toml` of a framework's folder, which tools/framework_defaults.py extracts from its sources."""
    return tomllib.loads(resources.files(f"debubble.frameworks.{framework}").joinpath("defaults.toml").read_text())
