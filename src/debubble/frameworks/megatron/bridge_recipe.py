"""Megatron-Bridge: the override of a recipe's configuration, as Python, for Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pprint import pformat
from typing import Any

_PARTS = {
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
"""Part of the configuration -> the arguments that it has; all others are the model's."""
_PRECISION = {"--bf16": "bf16_mixed", "--fp16": "fp16_mixed"}
_FP8 = {"hybrid": "bf16_with_fp8_delayed_scaling_mixed", "e4m3": "bf16_with_mxfp8_mixed"}
"""--fp8-format -> the recipe of Megatron-Bridge."""
_GRADIENTS = {"--grad-reduce-in-bf16": False, "--accumulate-allreduce-grads-in-fp32": True}
"""Argument -> whether gradients are summed in fp32, which the precision's recipe says in Megatron-Bridge."""
_ELSEWHERE = ("--num-layers", "--fp8-format", "--fp8-recipe", "--attention-backend", *_PRECISION, *_GRADIENTS)


class _Expression(str):
    """Python that is written as it stands."""

    def __repr__(self) -> str:
        return str(self)


_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.uint8"}
"""A dtype as an argument -> the same in Megatron-Bridge's optimizer."""

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

_SUMS = """\
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    cfg.mixed_precision = get_mixed_precision_config(PRECISION)
    cfg.mixed_precision.grad_reduce_in_fp32 = {wide}
"""


def bridge_recipe(arguments: Mapping[str, Any], environment: Mapping[str, str], *, chunks: int) -> str:
    """The override of a Megatron-Bridge recipe for Megatron-LM's arguments.

    Args:
        arguments: Name -> value; True for an argument that has none.
        environment: Environment variables that go with them.
        chunks: Stages per device.
    """
    precision = next((name for flag, name in _PRECISION.items() if flag in arguments), None)
    parts = {
        part: as_settings({flag: arguments[flag] for flag in flags if flag in arguments})
        for part, flags in _PARTS.items()
    }
    elsewhere = {flag for flags in _PARTS.values() for flag in flags} | set(_ELSEWHERE)
    model = as_settings({flag: value for flag, value in arguments.items() if flag not in elsewhere})
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
    gradients = next((_SUMS.format(wide=wide) for flag, wide in _GRADIENTS.items() if flag in arguments), "")
    return _RECIPE.format(
        imports="".join(f"\n{line}" for line in imports) + "\n" * bool(imports),
        gradients=gradients,
        precision=repr(_FP8[arguments["--fp8-format"]] if "--fp8-format" in arguments else precision),
        parts=pformat({"model": model, **parts}, width=110, sort_dicts=False),
        environment=dict(environment),
    )


def as_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments such as `--num-layers` by names such as `num_layers`, with lists for several words.

    An argument such as `--no-fusion` is the name `fusion`, false.
    """
    return dict(_setting(flag, value) for flag, value in arguments.items())


def _setting(flag: str, value: Any) -> tuple[str, Any]:
    name = flag[2:].replace("-", "_")
    if name.startswith("no_") and value is True:
        return name.removeprefix("no_"), False
    return name, list(value) if isinstance(value, tuple) else value
