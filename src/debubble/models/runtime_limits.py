"""What debubble's own runtime cannot run, as planning says it and as the runtime refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.ir.plan import RunOptions
from debubble.models.layer_types import halved

DTYPES = ("fp32", "bf16", "fp64")
"""The dtypes in which the runtime computes."""


def beyond_runtime(options: RunOptions, model: Mapping[str, Any] | None) -> str | None:
    """Why the runtime cannot run a plan with these options, as one sentence; None if it can.

    Args:
        options: How the plan's model is run.
        model: The model's Hugging Face config; None for abstract costs.
    """
    reason = None
    if options.context > 1:
        reason = "it has no context parallelism: make the plan with context 1 to train it."
    elif options.expert > 1:
        reason = "it has no expert parallelism: make the plan with expert 1 to train it."
    elif options.zero > 2:
        reason = "it keeps whole parameters on every replica: make the plan with zero 2 or less to train it."
    elif options.zero > 0 and options.optimizer == "muon":
        reason = (
            "ZeRO leaves every replica rows of each parameter and Muon needs whole ones: make the plan with zero 0."
        )
    elif options.dtype not in DTYPES:
        reason = f"it computes in {', '.join(DTYPES)}, not in '{options.dtype}': make the plan with one of them."
    elif options.lora and model is not None and not halved(model):
        reason = (
            f"it has no LoRA for '{model.get('model_type')}', which runs with transformers' modules: make the plan"
            " without."
        )
    return None if reason is None else f"The runtime cannot run this plan, because {reason}"
