"""The DeepSpeed configuration that a script of Megatron-DeepSpeed names or writes.

Source: microsoft/Megatron-DeepSpeed, megatron/arguments.py and training.py; DeepSpeed, runtime/engine.py and
pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from debubble.frameworks.deepspeed.import_ import HARMLESS as DEEPSPEED_HARMLESS
from debubble.frameworks.deepspeed.import_ import SUMMED, SUMMED_IN, default_sum
from debubble.frameworks.megatron.arguments import Arguments
from debubble.imports.settings import DEEPSPEED_ENTRIES
from debubble.ir import InputError, RunOptions

_STAGE, _ARGUMENT = f"{DEEPSPEED_ENTRIES}zero_optimization.stage", "--zero-stage"
_DEVICE = f"{DEEPSPEED_ENTRIES}zero_optimization.offload_optimizer.device"
_SIZE, _BATCH = f"{DEEPSPEED_ENTRIES}train_micro_batch_size_per_gpu", f"{DEEPSPEED_ENTRIES}train_batch_size"
_STEPS = f"{DEEPSPEED_ENTRIES}gradient_accumulation_steps"
_NO_PIPELINE, _PIPELINE = "--no-pipeline-parallel", "--pipeline-model-parallel-size"
_MONITORING = "steps_per_print wall_clock_breakdown dump_state gradient_clipping"
HARMLESS = " ".join(f"{DEEPSPEED_ENTRIES}{name}" for name in (*DEEPSPEED_HARMLESS.split(), *_MONITORING.split()))
"""Entries that cost neither time nor memory of a step."""


def has_config(arguments: Arguments) -> bool:
    """Tell whether the configuration is in the script or next to it."""
    return any(name.startswith(DEEPSPEED_ENTRIES) for name in arguments.settings)


def zero_stage(arguments: Arguments, default: int) -> int:
    """The ZeRO level, which the configuration decides if there is one.

    Raises:
        InputError: if there is no such level, or DeepSpeed's pipeline does not run with it.
    """
    name = _STAGE if has_config(arguments) else _ARGUMENT
    stage = arguments.count(name, 0 if has_config(arguments) else default)
    if stage not in range(4):
        raise arguments.refusal(name, f"is {stage}, and DeepSpeed has the levels 0, 1, 2 and 3")
    has_pipeline = arguments.size(_PIPELINE, 1) > 1 and not arguments.flag(_NO_PIPELINE)
    if stage > 1 and has_pipeline and arguments.flag("--deepspeed"):
        raise InputError(
            f"{arguments.path} has ZeRO-{stage}, with which DeepSpeed runs no pipeline: give --args '{_PIPELINE} 1"
            f" {_NO_PIPELINE}', or a copy with {name} 1."
        )
    return stage


def gradient_dtype(arguments: Arguments, dtype: str) -> str:
    """The dtype in which DeepSpeed sums gradients, whatever Megatron-LM's arguments say."""
    said = arguments.word(f"{DEEPSPEED_ENTRIES}{SUMMED_IN}", "auto")
    pipeline = 1 if arguments.flag(_NO_PIPELINE) else arguments.size(_PIPELINE, 1)
    dtype = dtype if dtype in ("fp16", "fp32") else "bf16"
    return SUMMED.get(str(said), default_sum(dtype, stage=zero_stage(arguments, 0), pipeline=pipeline))


def is_on_host(arguments: Arguments) -> bool:
    """Tell whether the configuration moves the optimizer to the host; NVMe counts as the host."""
    return arguments.word(_DEVICE, "none") in ("cpu", "nvme")


def config_warnings(arguments: Arguments, options: RunOptions, micro_batches: int) -> Iterator[str]:
    """Sentences on arguments that contradict the configuration, and on jobs that DeepSpeed does not start.

    Args:
        arguments: The script's arguments.
        options: The predicted job's options.
        micro_batches: The predicted number of micro-batches.
    """
    if not arguments.flag("--deepspeed"):
        return
    of_config = {
        _STAGE: arguments.word(_ARGUMENT),
        _SIZE: str(options.micro_batch_size),
        _STEPS: str(micro_batches),
        _BATCH: arguments.word("--global-batch-size"),
        **{f"{DEEPSPEED_ENTRIES}{dtype}.enabled": str(options.dtype == dtype) for dtype in ("bf16", "fp16")},
    }
    predicted = {_STAGE: "the configuration's is predicted"}
    for name, value in of_config.items():
        said = arguments.get(name)
        if None not in (said, value) and str(said) != value:
            yield f"{name} is {said}, and the script has {value}: {predicted.get(name, 'that is predicted')}."
    if arguments.flag(_NO_PIPELINE) and arguments.size(_PIPELINE, 1) > 1:
        yield f"Megatron-DeepSpeed does not start: {_NO_PIPELINE} needs {_PIPELINE} 1, which is predicted."
    stage = zero_stage(arguments, 0)
    if stage > 1 and not arguments.flag(_NO_PIPELINE):
        yield f"DeepSpeed does not start: ZeRO-{stage} needs {_NO_PIPELINE}, which is predicted."
