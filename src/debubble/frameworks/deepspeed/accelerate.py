"""Reads accelerate's configuration of DeepSpeed.

Source: accelerate 1.15, utils/dataclasses.py (DeepSpeedPlugin) and commands/config/config_args.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.imports.registry import Settings
from debubble.imports.shell.script_run import named_file
from debubble.imports.unread import listed_names, misspelt, misspelt_words
from debubble.ir import InputError

_SECTION, _FILE = "deepspeed_config.", "deepspeed_config_file"
_ENTRIES = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Entry of accelerate's section -> DeepSpeed's entry."""
_DEFAULTS = {
    "zero_optimization.stage": 2,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
_DEGREES = tuple(f"parallelism_config.parallelism_config_{degree}_size" for degree in ("tp", "cp", "sp"))
_STRATEGY, _RESHARDS = "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"
_KIND, _ENVIRONMENT, _DTYPE = "distributed_type", "compute_environment", "mixed_precision"
HARMLESS = """
    machine_rank main_* same_network downcast_bf16 gpu_ids enable_cpu_affinity tpu_* debug use_cpu
    deepspeed_config.deepspeed_* deepspeed_config.zero3_init_flag
"""
"""Entries that cost neither time nor memory of a step."""
COMPLETE = f"{_SECTION}*"
"""Pattern of the entries of which all names are known."""


def is_accelerate(settings: Settings) -> bool:
    """Tell whether a file is accelerate's configuration."""
    return _KIND in settings or _ENVIRONMENT in settings


def read_accelerate(settings: Settings, path: Path, read_config: Callable[[Path], Settings]) -> dict[str, Any]:
    """DeepSpeed's entries for those of accelerate's file, and the other entries as they are.

    Args:
        settings: The file's settings.
        path: The file.
        read_config: Reads the DeepSpeed configuration that it may name.

    Raises:
        InputError: if it does not start DeepSpeed, or names a file that is not there.
    """
    kind = str(settings.get(_KIND, "NO")).rpartition(".")[2].upper()
    if kind != "DEEPSPEED":
        known = listed_names("deepspeed", "accelerate.txt")
        near = misspelt_words(misspelt(settings, known))
        raise InputError(
            f"{path} {f'has {near}; it ' if near else ''}is accelerate's of distributed_type {kind}, and DEEPSPEED is"
            f" read: {_instead(kind, settings)}."
        )
    for degree in _DEGREES:
        if settings.get(degree, 1) not in (None, 1):
            raise InputError(
                f"{path}: {degree} is {settings[degree]}, which is not predicted with DeepSpeed: to predict the job"
                f" without, give a copy with {degree}: 1."
            )
    specified = {name.removeprefix(_SECTION): value for name, value in settings.items() if name.startswith(_SECTION)}
    named = specified.pop(_FILE, None)
    file = None if named is None else named_file(str(named), path)
    if named is not None and file is None:
        raise InputError(f"{path} has DeepSpeed's configuration in {named}, which is not next to it: put it there.")
    config = dict(_DEFAULTS) if file is None else dict(read_config(file))
    entries = dict(_as_deepspeed(specified)) if file is None else {}
    rest = {name: value for name, value in settings.items() if not name.startswith(_SECTION)}
    unread = {f"{_SECTION}{name}": value for name, value in specified.items() if file or name not in _ENTRIES}
    remaining = {name: value for name, value in rest.items() if name not in (_KIND, _ENVIRONMENT, _DTYPE)}
    return {**config, **entries, **dict(_dtypes(rest.get(_DTYPE), config)), **unread, **remaining}


def _instead(kind: str, settings: Settings) -> str:
    """The command that predicts and plans a job that accelerate runs without DeepSpeed."""
    if kind == "MEGATRON_LM":
        return "import the script of the same job with Megatron-LM's arguments, `debubble import megatron`"
    strategy = str(settings.get(_STRATEGY, "FULL_SHARD")).rpartition(".")[2].upper()
    reshards = settings.get(_RESHARDS, strategy not in ("SHARD_GRAD_OP", "2")) is True
    zero = 0 if kind != "FSDP" or strategy in ("NO_SHARD", "3") else 3 if reshards else 2
    count = settings.get("num_processes", "N")
    return (
        f"`debubble plan MODEL --cluster {count}xGPU --pipeline 1 --data {count} --zero {zero} --global-batch SEQUENCES"
        " --sequence-length TOKENS` plans such a job, and without the degrees what is faster"
    )


def _as_deepspeed(specified: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in specified.items():
        if name in _ENTRIES and value is not None:
            yield _ENTRIES[name], value


def _dtypes(precision: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of dtypes that the configuration leaves out or to its trainer."""
    if precision not in (None, False, "no", "bf16", "fp16"):
        yield _DTYPE, precision
    precision = "bf16" if precision == "fp8" else precision
    for dtype in ("bf16", "fp16"):
        entry = f"{dtype}.enabled"
        if config.get(entry, "auto") == "auto" and precision == dtype:
            yield entry, True
