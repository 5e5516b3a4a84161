"""Imports DeepSpeed's JSON configuration, and the Python files that debubble exports next to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from debubble.costs import framework_with
from debubble.costs.devices.speed import element_bytes
from debubble.costs.step import MOMENTS
from debubble.formatting import listed, size_words
from debubble.frameworks.deepspeed import accelerate, trainer
from debubble.frameworks.deepspeed.accelerate import is_accelerate, read_accelerate
from debubble.frameworks.deepspeed.partition import DEFAULT_METHOD, divided_states, partitioned_layers
from debubble.frameworks.deepspeed.scripts import read_script
from debubble.frameworks.deepspeed.trainer_files import config_of, is_trainer_file, trainer_arguments
from debubble.frameworks.torch.shared_settings import layer_strategies
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults
from debubble.imports.job import ImportedJob, MoreMemory, batches_in, replicas
from debubble.imports.kinds import INTEGER
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Importer, Settings, UserFacts, imports
from debubble.imports.settings import OPEN_LOOP, read_constants, read_settings
from debubble.imports.shell.script_run import SCRIPTS
from debubble.imports.unread import Unread
from debubble.ir import InputError, RunOptions
from debubble.models import Model

_MODULE = "planned_pipeline.py"
_LAYERS = "planned_layers.py"


def read_with_trainer(path: Path, command_line: CommandLine | None) -> Mapping[str, Any]:
    """The settings of a configuration, completed by the Trainer's arguments in the same file or the command line."""
    if path.suffix in SCRIPTS:
        script = read_script(path, command_line, read_config)
        arguments = {**script.arguments, **({OPEN_LOOP: [script.loop]} if script.loop else {})}
        return trainer.with_trainer(as_deepspeed(script.config, path), path, command_line, arguments)
    settings = read_config(path)
    if not is_trainer_file(settings):
        return trainer.with_trainer(settings, path, command_line)
    config, arguments = config_of(settings, path, read_config), trainer_arguments(settings, path)
    return trainer.with_trainer(config, path, command_line, arguments)


def read_config(path: Path) -> Mapping[str, Any]:
    """The settings of a configuration, and the constants in debubble's Python files next to it."""
    alongside = [path.parent / name for name in (_MODULE, _LAYERS)]
    planned = {
        f"{module.name}: {name}": sorted(value)
        for module in alongside
        if module.exists()
        for name, value in read_constants(module).items()
    }
    return {**as_deepspeed(read_settings(path), path), **planned}


def as_deepspeed(settings: Settings, path: Path) -> dict[str, Any]:
    """The entries of a file by DeepSpeed's current names, also of accelerate's file."""
    if is_accelerate(settings):
        settings = read_accelerate(settings, path, read_config)
    return dict(_renamed(settings))


def _renamed(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries by their current names; zero_optimization was once a switch, and bf16 was bfloat16."""
    has_bf16 = any(name.partition(".")[0] == "bf16" for name in settings)
    for name, value in settings.items():
        if name == "zero_optimization" and isinstance(value, bool):
            yield STAGE, int(value)
        elif name.startswith("bfloat16.") and not has_bf16:
            yield name.replace("bfloat16", "bf16", 1), value
        else:
            yield name, value


DEFAULTS = Defaults("DeepSpeed")
"""runtime/constants.py: neither bf16 nor fp16 is enabled, ZeRO-0."""
HARMLESS = """
    zero_optimization.offload_*.pin_memory zero_optimization.offload_*.buffer_* zero_optimization.offload_*.nvme_path
    zero_optimization.offload_*.max_in_cpu zero_optimization.offload_*.fast_init zero_optimization.offload_*.pipeline*
    bf16.check_grad_overflow fp16.loss_scale* fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale
    fp16.consecutive_hysteresis optimizer.params.* scheduler.* tensorboard.* wandb.* csv_monitor.* comms_logger.*
    flops_profiler.* zero_allow_untested_optimizer prescale_gradients gradient_predivide_factor checkpoint.*
    planned_* zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.round_robin_gradients
    zero_optimization.ignore_unused_parameters zero_force_ds_cpu_optimizer disable_allgather
"""
"""Entries that cost neither time nor memory of a step, besides those of all frameworks."""
CONVERTS = "bf16.* fp16.* zero_optimization.* --*"
"""The sections that pydantic parses, which converts strings, and the Trainer's arguments, which are converted too."""

STAGE = "zero_optimization.stage"
OFFLOADED = "zero_optimization.offload_optimizer"
_DEVICE = f"{OFFLOADED}.device"
PARAMETERS = "zero_optimization.offload_param"


def conflicts(job: Settings, changed: Settings) -> Iterator[str]:
    """The job's offload entries that DeepSpeed rejects at the ZeRO level after the changes."""
    stage = changed.get(STAGE, job.get(STAGE, 0))
    needs = {OFFLOADED: 1, PARAMETERS: 3}
    for name in job:
        section = name.rpartition(".")[0]
        if section in needs and isinstance(stage, int) and stage < needs[section]:
            yield name


def switches(job: Settings, options: RunOptions) -> Iterator[Settings]:
    """Yield higher ZeRO levels, and every level with the optimizer moved to the host, or back to the devices."""
    stage = job.get(STAGE, 0)
    levels = range(stage if isinstance(stage, int) else 0, 4)
    yield from ({STAGE: level} for level in levels[1:])
    if options.host_optimizer:
        yield {_DEVICE: "none"}
        yield from ({STAGE: level, _DEVICE: "none"} for level in levels[1:])
    elif options.optimizer in ("adam", "adamw"):
        yield from ({STAGE: level, _DEVICE: "cpu"} for level in levels if level)


def deepspeed(read: SettingsReader, facts: UserFacts) -> ImportedJob:
    """The job of a DeepSpeed configuration, with stages and recomputation from debubble's module."""
    zero = _stage(read)
    config_dtype = _dtype(read)
    model, length = facts.model or trainer.model_of(read), facts.sequence_length or trainer.length_of(read)
    _check_complete(read, facts, model=model, length=length)
    if read.count(_TENSOR) > 1:
        raise InputError(
            f"{read.path}: {_TENSOR} is {read.count(_TENSOR)}, and DeepSpeed's tensor parallelism is not predicted: to"
            f" predict the job without, give --args '--{_TENSOR} 1'."
        )
    assert model is not None
    assert length is not None
    layers = _layers_per_stage(read, facts, model)
    pipeline = len(layers)
    data = replicas(facts.cluster, read.path, pipeline=pipeline)
    size, number = _micro_batches(read, data, instead=facts.micro_batches)
    predicted = size * number * data
    # A trainer replaces 'auto' by this product.
    batch = predicted if read.get("train_batch_size") == "auto" else read.size("train_batch_size", predicted)
    if pipeline > 1 and zero > 1:
        raise InputError(f"{read.path} has ZeRO-{zero}, with which DeepSpeed runs no pipeline: give --pipeline 1.")
    if read.flag(_MOMENTS) and not read.flag(_MASTERS):
        raise InputError(f"{read.path}: {_MOMENTS} is on without {_MASTERS}, which DeepSpeed refuses: set both.")
    if read.flag(_MASTERS) and zero == 0:
        raise InputError(f"{read.path}: {_MASTERS} is on without ZeRO, which DeepSpeed refuses: set {STAGE}.")
    dtype = facts.dtype or config_dtype
    gradients = _gradients(read, dtype, pipeline=pipeline)
    gathered = _gathered(read, model, dtype)
    optimizer = trainer.optimizer_of(read)
    options = RunOptions(
        micro_batch_size=size,
        sequence_length=length,
        data=data,
        zero=divided_states(zero, dtype) if data > 1 else 0,
        optimizer=optimizer,
        dtype=dtype,
        master_dtype="bf16" if read.flag(_MASTERS) and dtype == "bf16" else "fp32",
        host_optimizer=float(zero > 0 and _on_host(read, OFFLOADED)),
        lora=trainer.rank_of(read),
        framework=framework_with(
            "deepspeed", gradient_bytes=4 if gradients == "fp32" else None, bucket_bytes=_bucket_bytes(read)
        ),
    )
    remarks = (
        *_remarks(read, facts, pipeline=pipeline),
        *trainer.remarks(read, optimizer, facts.sequence_length),
        *([] if gathered is None else [gathered.sentence]),
    )
    has_trainer = any(name.startswith("--") for name in read.settings)
    return ImportedJob(
        target="deepspeed",
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=number,
        layers=layers,
        order="1f1b",
        strategies=layer_strategies([*_recomputed_layers(read, model)]),
        gradients=gradients,
        warnings=(*_batch_warnings(read, batch, predicted), *_warnings(read, dtype, pipeline=pipeline)),
        defaulted=read.defaulted(dtype=_DTYPES, gradients=(SUMMED_IN,), zero=(STAGE,)),
        rest=replace(
            Unread.from_reader(read, remarks), framework=f"DeepSpeed{' or the Trainer' if has_trainer else ''}"
        ),
        more_memory=gathered,
    )


def _layers_per_stage(read: SettingsReader, facts: UserFacts, model: Model) -> tuple[int, ...]:
    """Layers per stage, from debubble's module or by DeepSpeed's partition."""
    bounds = read.numbers(f"{_MODULE}: BOUNDS")
    if len(bounds) > 1:
        counts = [end - begin for begin, end in pairwise(bounds)]
        counts[0] -= 1
        counts[-1] -= 1
        return tuple(counts)
    stages = facts.pipeline or _pipeline(read, facts.cluster.count)
    return tuple(partitioned_layers(_partition(read), model, stages)) if stages > 1 else (model.layers,)


def _recomputed_layers(read: SettingsReader, model: Model) -> Iterator[int]:
    """The layers that debubble's module or function recomputes, or all if the trainer checkpoints them."""
    yield from (index - 1 for index in read.numbers(f"{_MODULE}: RECOMPUTED_LAYERS"))
    yield from read.numbers(f"{_LAYERS}: RECOMPUTED_LAYERS")
    yield from range(model.layers) if read.flag(trainer.CHECKPOINTING) else ()


imports.add(
    "deepspeed",
    Importer(
        name="deepspeed", read_job=deepspeed, settings=read_config, file="ds_config.json", defaults=DEFAULTS,
        harmless=HARMLESS + trainer.HARMLESS + accelerate.HARMLESS, with_arguments=read_with_trainer,
        conflicts=conflicts, switches=switches,
        converts=CONVERTS, complete=f"bf16.* fp16.* zero_optimization.* {accelerate.COMPLETE}",
        own_arguments=True,
        marks="zero_optimization.* train_micro_batch_size_per_gpu train_batch_size",
    ),
)  # fmt: skip


def _check_complete(read: SettingsReader, facts: UserFacts, *, model: Model | None, length: int | None) -> None:
    """Raise InputError with all facts that are left to the user or trainer, and the options that set them."""
    batch = ("train_micro_batch_size_per_gpu", *(() if facts.micro_batches else ("gradient_accumulation_steps",)))
    numbers = [name for name in (*batch, STAGE) if read.get(name) == "auto"]
    auto = [*([] if facts.dtype else _auto_dtypes(read)), *numbers]
    missing = [
        *(["the model"] if model is None else []),
        *(["the length of sequences"] if length is None else []),
    ]
    open_entries = [
        *([f"does not say {listed(missing)}"] if missing else []),
        *([f"leaves {listed(auto)} to your trainer ('auto')"] if auto else []),
    ]
    options = {
        "--model llama3-8b": model is None,
        "--sequence-length 4096": length is None,
        "--dtype bf16": len(auto) > len(numbers),
        f"--args '{' '.join(f'--{name} 1' for name in numbers)}'": bool(numbers),
    }
    if open_entries:
        needed = " ".join(option for option, is_open in options.items() if is_open)
        trainers = ", or your trainer's own arguments in --args" if auto else ""
        raise InputError(f"{read.path} {' and '.join(open_entries)}: add {needed}, with your values{trainers}.")


_TENSOR = "tensor_parallel.autotp_size"
_MASTERS, _MOMENTS = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
_DTYPES = ("bf16.enabled", "fp16.enabled")
_STAGES = "pipeline.stages"
_PARTITIONS = ("pipeline.partition_method", "pipeline.partition", "partition_method")


def _auto_dtypes(read: SettingsReader) -> list[str]:
    """The dtype entries that a trainer determines; empty if one is enabled."""
    if any(read.get(name) != "auto" and read.flag(name) for name in _DTYPES):
        return []
    return [name for name in _DTYPES if read.get(name) == "auto"]


def _dtype(read: SettingsReader) -> str:
    """The dtype that is enabled; raises InputError if both are."""
    on = [name for name in _DTYPES if read.get(name) != "auto" and read.flag(name)]
    if len(on) > 1:
        raise InputError(f"{read.path} enables bf16 and fp16, of which DeepSpeed takes one.")
    return on[0].partition(".")[0] if on else "fp32"


def _stage(read: SettingsReader) -> int:
    """The ZeRO level; 0 if a trainer determines it, which is reported elsewhere."""
    stage = 0 if read.get(STAGE) == "auto" else read.number(STAGE, 0)
    if stage not in range(4):
        raise read.refusal(STAGE, f"is {stage}, and DeepSpeed has the levels 0, 1, 2 and 3")
    return stage


SUMMED_IN = "data_types.grad_accum_dtype"
"""The setting of the dtype in which gradients are summed."""


def _gradients(read: SettingsReader, dtype: str, *, pipeline: int) -> str:
    """The dtype in which gradients are summed; by default the compute dtype.

    Without ZeRO a pipeline stores bf16 gradients twice, which takes as much memory as fp32.  Source:
    deepspeed/runtime/engine.py, get_data_types, from 0.17.6 on.
    """
    specified = read.choice(SUMMED_IN, "", {"": "", **SUMMED}) if read.get(SUMMED_IN) != "auto" else ""
    return specified or default_sum(dtype, stage=_stage(read), pipeline=pipeline)


def default_sum(dtype: str, *, stage: int, pipeline: int) -> str:
    """The dtype in which gradients are summed at a ZeRO level unless the configuration says it."""
    return "fp32" if dtype == "bf16" and stage == 0 and pipeline > 1 else dtype


SUMMED = {
    "bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "float32": "fp32", "float": "fp32",
}  # fmt: skip
"""DeepSpeed's names of dtypes.  Source: deepspeed/runtime/config.py, DtypeEnum."""


def _on_host(read: SettingsReader, section: str) -> bool:
    """Tell whether an offload section names the host; NVMe counts as the host."""
    name = f"{section}.device"
    return read.get(name) != "auto" and read.one_of(name, "none", ("none", "cpu", "nvme")) != "none"


def _warnings(read: SettingsReader, dtype: str, *, pipeline: int) -> Iterator[str]:
    """Sentences on gradients that need more memory, and on offload that the prediction does not follow."""
    if dtype == "bf16" and _stage(read) == 0 and pipeline == 1 and read.get(SUMMED_IN) is None:
        yield (
            "Without ZeRO gradients are predicted in bf16, as DeepSpeed sums them from 0.17.6 on; before, they are in"
            f" fp32, with 2 bytes a parameter more: {SUMMED_IN} decides."
        )
    summed = (
        read.get(SUMMED_IN) is not None and _gradients(read, dtype, pipeline=pipeline) == "fp32" and _stage(read) == 1
    )
    at_once = read.flag("bf16.immediate_grad_update")
    if dtype == "bf16" and summed and not _on_host(read, OFFLOADED) and not at_once:
        yield (
            "Gradients in fp32 under ZeRO-1 are next to those in bf16, whose 2 bytes a parameter are not in the"
            " prediction: bf16.immediate_grad_update saves them."
        )
    if _on_host(read, PARAMETERS):
        yield (
            f"{PARAMETERS} is not in the prediction: the parameters of a rank are counted on its device, and their"
            " copies from the host are not."
        )
    if (name := read.text("optimizer.type", "adamw")).lower() not in MOMENTS:
        yield f"optimizer.type is {name}, and the prediction counts on AdamW."
    if read.get(_DEVICE) == "nvme":
        yield f"{OFFLOADED} is on NVMe, and predicted as if it were in the host's memory."
    if _on_host(read, OFFLOADED) and _stage(read) == 0:
        yield f"{OFFLOADED} needs ZeRO-1 or more, and has no effect in the prediction under ZeRO-0."
    if read.share(f"{OFFLOADED}.ratio") != 1:
        yield f"{OFFLOADED}.ratio is not 1: all optimizer states are predicted on the host."


def _partition(read: SettingsReader) -> str:
    """DeepSpeed's partition method; `best`, the default of the configuration, is PipelineModule's default."""
    method = next((read.text(name, "") for name in _PARTITIONS if read.get(name) is not None), DEFAULT_METHOD)
    return DEFAULT_METHOD if method == "best" else method


def _micro_batches(read: SettingsReader, data: int, *, instead: int | None) -> tuple[int, int]:
    """Sequences per micro-batch and micro-batches per replica; a missing one follows from the global batch."""
    size, number, batch = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
    if read.get(batch) is None or instead is not None or None not in (read.get(size), read.get(number)):
        return read.size(size, 1), read.size(number, 1, instead=instead)
    total = read.size(batch)
    local = batches_in(total, data, read.path, name=batch)
    if read.get(size) is None and read.get(number) is not None:
        return batches_in(total, data * read.size(number), read.path, name=batch), read.size(number)
    return read.size(size, local), batches_in(total, data * read.size(size, local), read.path, name=batch)


def _pipeline(read: SettingsReader, devices: int) -> int:
    """The pipeline devices without debubble's module: all devices over the replicas that follow from the batch.

    Without a batch there is no pipeline, as in most jobs; DeepSpeed's pipeline engine rejects ZeRO-2 and ZeRO-3.
    """
    if read.get(_STAGES) not in (None, "auto"):
        return read.size(_STAGES)
    if _stage(read) > 1:
        return 1
    local = read.size("gradient_accumulation_steps", 1) * read.size("train_micro_batch_size_per_gpu", 1)
    batch = read.get("train_batch_size")
    replicas = batch // local if isinstance(batch, int) and batch % local == 0 else 0
    return devices // replicas if replicas > 0 and devices % replicas == 0 else 1


def _batch_warnings(read: SettingsReader, batch: int, predicted: int) -> Iterator[str]:
    if read.get("train_batch_size") is None and read.get("train_micro_batch_size_per_gpu") is None:
        yield (
            "DeepSpeed does not start without train_batch_size or train_micro_batch_size_per_gpu: predicted are"
            " micro-batches of one sequence."
        )
    if batch != predicted:
        yield (
            f"DeepSpeed does not start: train_batch_size is {batch}, and the micro-batches of the cluster's replicas"
            f" make {predicted}, which is predicted."
        )


def _remarks(read: SettingsReader, facts: UserFacts, *, pipeline: int) -> Iterator[str]:
    if pipeline == 1 and _stage(read) < 2:
        yield "Nothing says that there is a pipeline: predicted is none; if your script has one, give --pipeline."
    said_stages = facts.pipeline or read.get(f"{_MODULE}: BOUNDS") or type(read.get(_STAGES)) is int
    if pipeline > 1 and not said_stages:
        yield (
            f"train_batch_size is of {facts.cluster.count // pipeline} replicas, and the cluster has"
            f" {facts.cluster.count} devices: predicted is a pipeline of {pipeline}; if your script has none, give"
            " --pipeline 1, or the --cluster that the job has."
        )
    said = (f"{_LAYERS if pipeline == 1 else _MODULE}: RECOMPUTED_LAYERS", trainer.CHECKPOINTING)
    if all(read.get(name) is None for name in said) and facts.recompute is None:
        yield "Recomputation is your script's: predicted is none; if it checkpoints layers, give --recompute full."
    if pipeline > 1 and read.get(f"{_MODULE}: BOUNDS") is None:
        yield f"Stages are your script's: predicted is partition_method '{_partition(read)}'."
    if read.flag(_MASTERS) and not read.flag(_MOMENTS):
        yield f"{_MASTERS} is on without {_MOMENTS}: moments are predicted in bf16, too."


_BUCKETS = ("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size")
_BUCKET_SIZE, _BUCKET_ELEMENT = 500_000_000, 2
"""Numbers per bucket by default, and bytes per number."""


def _bucket_bytes(read: SettingsReader) -> int | None:
    """Bytes of the buckets for gradients and parameters; None: the default."""
    specified = {name: read.size(name) for name in _BUCKETS if read.get(name) not in (None, "auto")}
    return _BUCKET_ELEMENT * sum(specified.get(name, _BUCKET_SIZE) for name in _BUCKETS) if specified else None


_LIVE_PARAMETERS = 10**9
"""DeepSpeed's default of stage3_max_live_parameters."""


def _gathered(read: SettingsReader, model: Model, dtype: str) -> MoreMemory | None:
    """The memory of parameters that ZeRO-3 may keep gathered beyond the two predicted layers; None: none."""
    name = "zero_optimization.stage3_max_live_parameters"
    specified = None if read.get(name) == "auto" else read.entry(name, INTEGER)
    max_live = _LIVE_PARAMETERS if specified is None else specified
    if max_live < 0:
        raise read.refusal(name, f"is {max_live}, and must be at least 0")
    for other in ("max_reuse_distance", "prefetch_bucket_size"):
        if read.get(entry := f"zero_optimization.stage3_{other}") != "auto":
            read.count(entry)
    layers = [model.layer_parameters(layer) for layer in range(model.layers)]
    predicted, gathered = 2 * max(layers), min(int(max_live), sum(layers))
    if _stage(read) != 3 or gathered <= predicted:
        return None
    extra = element_bytes(dtype) * (gathered - predicted)
    origin = "" if max_live is specified else " by default"
    return MoreMemory(
        size=extra,
        setting=name,
        sentence=f"{name} is {max_live:,.0f}{origin}, and the prediction counts on two gathered layers, {predicted:,}"
        f" parameters: up to {size_words(extra)} per device may be added, which a lower value saves.",
    )
