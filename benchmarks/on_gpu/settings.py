"""Sizes of the measurements: full size on a GPU, or a dry run of the same code on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from debubble.models import models

Config = dict[str, Any]

LLAMA3_8B: Config = dict(models["llama3-8b"].config)
MIXTRAL: Config = dict(models["mixtral-8x7b"].config)
TINY: Config = {
    **LLAMA3_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
TINY_MIXTURE: Config = {**MIXTRAL, **{k: TINY[k] for k in TINY if k != "model_type"}, "num_local_experts": 4}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All sizes of a run."""

    dry: bool
    device: str
    dtype: str
    dense: Config
    mixture: Config
    lengths: tuple[int, ...]
    """Tokens per sequence: the first is for the plans for 4 devices, the last for those for 8."""
    micro_batches: tuple[int, ...]
    """Micro-batches of the plans for 4 and for 8 devices."""
    measured_devices: dict[int, tuple[int, ...]]
    """Devices whose programs run, by number of devices of the plan; all if absent."""
    compiler: str
    """Backend of torch.compile."""
    repetitions: int
    steps: int
    """Measured steps of a program, after the first."""
    copied: int
    """Bytes of a copy over the host link."""
    large: Config
    """Config of the model that does not fit."""
    large_rows: int
    """Rows of a dry run; a GPU takes as many as do not fit in its memory."""
    large_length: int
    large_limit: float | None
    """Bytes from which a dry run reports that it does not fit; a GPU reports it itself."""
    large_steps: int
    overhead: tuple[tuple[str, Config, int], ...]
    """Models whose operations are compared with torch.distributed.pipelining: name, config, tokens of a sequence."""


FULL = Settings(
    dry=False, device="cuda", dtype="bf16", dense=LLAMA3_8B, mixture=MIXTRAL, lengths=(4096, 8192),
    micro_batches=(8, 16), measured_devices={8: (0, 7)}, compiler="inductor", repetitions=4, steps=2, copied=2**28,
    large={**LLAMA3_8B, "num_hidden_layers": 8, "vocab_size": 32000}, large_rows=0, large_length=8192,
    large_limit=None, large_steps=4,
    overhead=(
        ("small", {**LLAMA3_8B, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
                   "num_hidden_layers": 8, "vocab_size": 1024}, 128),
        ("llama3-8b layers", {**LLAMA3_8B, "num_hidden_layers": 4, "vocab_size": 32000}, 4096),
    ),
)  # fmt: skip

DRY = Settings(
    dry=True, device="cpu", dtype="fp32", dense=TINY, mixture=TINY_MIXTURE, lengths=(32, 32), micro_batches=(4, 8),
    measured_devices={8: (0, 7)}, compiler="aot_eager", repetitions=1, steps=1, copied=2**18,
    large={**TINY, "num_hidden_layers": 4}, large_rows=8, large_length=64, large_limit=9e6, large_steps=3,
    overhead=(("small", {**TINY, "num_hidden_layers": 4}, 32),),
)  # fmt: skip


def settings(*, dry: bool) -> Settings:
    return DRY if dry else FULL
