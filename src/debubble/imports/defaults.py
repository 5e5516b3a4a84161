"""The defaults of each framework for the settings that a file does not have.

Files override: a Primus experiment its trainer's and its model's base configuration, torchtitan's TOML the fields of
its JobConfig, a Megatron-Bridge file a recipe.
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
        of: Whose they are, in words.
        values: Setting -> value; those that are off, or that the reader has as its own default, are left out.
    """

    of: str
    values: Mapping[str, Any] = field(default_factory=dict)


@cache
def own_defaults(framework: str) -> Mapping[str, Any]:
    """The defaults in a framework's own files: its folder's `defaults.toml`, by tools/framework_defaults.py."""
    return tomllib.loads(resources.files(f"debubble.frameworks.{framework}").joinpath("defaults.toml").read_text())
