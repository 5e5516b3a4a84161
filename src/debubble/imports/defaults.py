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


NO_DEFAULTS = Defaults("the framework")

_TORCHTITAN = (
    "training.local_batch_size", "training.seq_len", "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
)  # fmt: skip
"""The settings of torchtitan that the reader has no defaults of its own for."""


@cache
def framework_defaults(name: str) -> Mapping[str, Any]:
    """The defaults in a framework's own files, written by tools/framework_defaults.py."""
    text = resources.files("debubble.imports").joinpath("framework_defaults.toml").read_text()
    return tomllib.loads(text)[name]  # type: ignore[no-any-return]


DEFAULTS: Mapping[str, Defaults] = {
    # arguments.py: fp32, no distributed optimizer, no sequence parallelism, nothing recomputed.
    "megatron": Defaults("Megatron-LM"),
    # The mixed_precision and ddp of the library's recipes, which such a file overrides.
    "megatron-bridge": Defaults(
        "Megatron-Bridge's recipes", {"--bf16": True, "--use-distributed-optimizer": True, "peft.dim": 32}
    ),
    # slime's arguments.py: set_default_megatron_args.
    "slime": Defaults("slime", {"--bf16": True, "--use-distributed-optimizer": True}),
    # primus/configs: the trainer and the model that an experiment names, which its importer adds.
    "primus": Defaults("Primus"),
    "torchtitan": Defaults(
        "torchtitan",
        {name: value for name, value in framework_defaults("torchtitan")["values"].items() if name in _TORCHTITAN},
    ),
    # The recipes' base classes: weights in bf16, FSDP2, one sequence per batch.
    "automodel": Defaults("Automodel"),
    # runtime/constants.py: neither bf16 nor fp16 is enabled, ZeRO-0.
    "deepspeed": Defaults("DeepSpeed"),
    # The optimizer is not divided unless enable_parallel_optimizer is set.
    "mindformers": Defaults("MindFormers"),
    "torch": Defaults("this importer"),
}
"""Framework -> its defaults."""
