"""Writes a Python file that overrides a Megatron-Bridge recipe by Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pprint import pformat
from typing import Any

_SECTIONS = {
    "train": ("--micro-batch-size", "--global-batch-size"),
    "ddp": (
        "--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy",
        "--overlap-grad-reduce", "--overlap-param-gather",
    ),
    "optimizer": (
        "--optimizer", "--sgd-momentum", "--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype",
        "--use-distributed-optimizer", "--optimizer-cpu-offload", "--optimizer-offload-fraction",
        "--overlap-cpu-optimizer-d2h-h2d",
    ),
    "checkpoint": ("--ckpt-format",),
    "comm_overlap": ("--tp-comm-overlap", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"),
}  # fmt: skip
"""Section of the configuration -> its arguments; all others belong to the model."""
_PRECISION = {"--bf16": "bf16_mixed", "--fp16": "fp16_mixed"}
_FP8 = {"hybrid": "bf16_with_fp8_delayed_scaling_mixed", "e4m3": "bf16_with_mxfp8_mixed"}
"""Value of --fp8-format -> Megatron-Bridge's mixed-precision recipe."""
_GRADIENTS = {"--grad-reduce-in-bf16": False, "--accumulate-allreduce-grads-in-fp32": True}
"""Argument -> whether gradients are reduced in fp32, a field of Megatron-Bridge's mixed-precision recipe."""
_NON_MODEL = ("--num-layers", "--fp8-format", "--fp8-recipe", "--attention-backend", *_PRECISION, *_GRADIENTS)


class _Expression(str):
    """Python code, which `pformat` writes without quotes."""

    def __repr__(self) -> str:
        return str(self)


_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.uint8"}
"""Dtype of an argument -> its value in Megatron-Bridge's optimizer config."""

_RECIPE = '''\
"""A plan of debubble for Megatron-Bridge: `apply` changes a recipe's configuration."""

import os
{imports}
PRECISION = {precision}
PARTS = {parts}
ENVIRONMENT = {environment}


def apply(cfg):
    """The configuration with the plan; its model stays the recipe's."""
    os.environ.update(ENVIRONMENT)
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        setattr(cfg.model, name, None)
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        setattr(cfg.model, name, False)
    if PARTS["comm_overlap"] and cfg.comm_overlap is None:
        from megatron.bridge.training.comm_overlap import CommOverlapConfig

        cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    for part, settings in PARTS.items():
        for name, value in settings.items():
            setattr(getattr(cfg, part), name, value)
    if "seq_length" in PARTS["model"]:
        length = "seq_length" if hasattr(cfg.dataset, "seq_length") else "sequence_length"
        setattr(cfg.dataset, length, PARTS["model"]["seq_length"])
    if PRECISION is not None:
        cfg.mixed_precision = PRECISION
{gradients}    return cfg
'''

_GRADIENTS_CODE = """\
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    cfg.mixed_precision = get_mixed_precision_config(PRECISION)
    cfg.mixed_precision.grad_reduce_in_fp32 = {wide}
"""


def bridge_recipe(arguments: Mapping[str, Any], environment: Mapping[str, str], *, chunks: int) -> str:
    """The Python file that overrides a Megatron-Bridge recipe by Megatron-LM's arguments.

    Args:
        arguments: Name -> value; True for an argument without a value.
        environment: Environment variables to set.
        chunks: Stages per device.
    """
    precision = next((name for flag, name in _PRECISION.items() if flag in arguments), None)
    parts = {
        section: as_settings({flag: arguments[flag] for flag in flags if flag in arguments})
        for section, flags in _SECTIONS.items()
    }
    non_model = {flag for flags in _SECTIONS.values() for flag in flags} | set(_NON_MODEL)
    model = as_settings({flag: value for flag, value in arguments.items() if flag not in non_model})
    model["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    for name in ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"):
        model.setdefault(name, None)
    for name in ("fine_grained_activation_offloading", "sequence_parallel"):
        model.setdefault(name, False)
    imports = []
    if moments := [name for name in _MOMENTS if name in parts["optimizer"]]:
        parts["optimizer"] |= {name: _Expression(_DTYPES[parts["optimizer"][name]]) for name in moments}
        imports.append("import torch")
    if (backend := arguments.get("--attention-backend", "auto")) != "auto":
        model["attention_backend"] = _Expression(f"AttnBackend.{backend}")
        imports.append("from megatron.core.transformer.enums import AttnBackend")
    gradients = next((_GRADIENTS_CODE.format(wide=wide) for flag, wide in _GRADIENTS.items() if flag in arguments), "")
    return _RECIPE.format(
        imports="".join(f"\n{line}" for line in imports) + "\n" * bool(imports),
        gradients=gradients,
        precision=repr(_FP8[arguments["--fp8-format"]] if "--fp8-format" in arguments else precision),
        parts=pformat({"model": model, **parts}, width=110, sort_dicts=False),
        environment=dict(environment),
    )


def as_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments such as `--num-layers` as settings such as `num_layers`, with lists for several words.

    An argument such as `--no-fusion` becomes the setting `fusion`, false.
    """
    return dict(_setting(flag, value) for flag, value in arguments.items())


def _setting(flag: str, value: Any) -> tuple[str, Any]:
    name = flag[2:].replace("-", "_")
    if name.startswith("no_") and value is True:
        return name.removeprefix("no_"), False
    return name, list(value) if isinstance(value, tuple) else value
