"""What each framework takes for the settings that a file does not have.

Files override: a Primus experiment its trainer's and its model's base configuration, torchtitan's TOML the fields of
its JobConfig, a Megatron-Bridge file a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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

DEFAULTS: Mapping[str, Defaults] = {
    # arguments.py: fp32, no distributed optimizer, no sequence parallelism, nothing recomputed.
    "megatron": Defaults("Megatron-LM"),
    # The mixed_precision and ddp of the library's recipes, which such a file overrides.
    "megatron-bridge": Defaults(
        "Megatron-Bridge's recipes", {"--bf16": True, "--use-distributed-optimizer": True, "peft.dim": 32}
    ),
    # primus/configs: pre_trainer.yaml, and language_model.yaml, which every model extends.
    "primus": Defaults(
        "Primus",
        {
            "--bf16": True,
            "--use-distributed-optimizer": True,
            "--sequence-parallel": True,
            "--micro-batch-size": "2",
            "--global-batch-size": "16",
            "--seq-length": "1024",
            "--untie-embeddings-and-output-weights": True,
            "--swiglu": True,
            "--disable-bias-linear": True,
        },
    ),
    # torchtitan/config/job_config.py.
    "torchtitan": Defaults(
        "torchtitan",
        {
            "training.local_batch_size": 8,
            "training.seq_len": 2048,
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
        },
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
