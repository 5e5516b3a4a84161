"""The reference model for all pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from debubble.models.config import ModelConfig
from debubble.runtime.memory.recomputation import Operators, run_without_recompute
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.hf.names import TABLE
from debubble.runtime.models.units import Head, MicroBatch


class ReferenceModel(nn.Module):
    """The full model in one process, built from the same units.

    Its loss excludes the routers' auxiliary loss.
    """

    def __init__(self, hf_config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        config = ModelConfig.from_hf(hf_config)
        units = build_stage(hf_config, config.units, seed=seed, dtype=dtype)
        self.units = nn.ModuleList(units)
        if config.tied:
            head = units[-1]
            assert isinstance(head, Head)
            head.lm_head.weight = self.hf_parameters()[TABLE[config.is_gpt2]]

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by Hugging Face name; a tied table has both names."""
        return {name: p for unit in self.units for name, p in unit.hf_parameters().items()}  # type: ignore[operator]

    def forward(
        self, tokens: Tensor, micro_batch: MicroBatch | None = None, op: Operators = run_without_recompute
    ) -> Tensor:
        """Logits, or the loss if the micro-batch has targets."""
        x = tokens
        for unit in self.units:
            x = unit(x, micro_batch or MicroBatch(), op)
        return x
