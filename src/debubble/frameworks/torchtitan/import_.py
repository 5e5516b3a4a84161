"""Imports torchtitan's TOML and JSON configurations, and the recipe that debubble exports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from debubble.costs import framework_with
from debubble.costs.step import MOMENTS
from debubble.frameworks.torch.shared_settings import (
    balanced_layers,
    chunks_of,
    expert_ranks,
    layer_strategies,
    layers_by_modules,
    order_of,
)
from debubble.frameworks.torchtitan.models import flavor_model, flavors_of
from debubble.frameworks.torchtitan.primus import is_experiment, read_experiment
from debubble.frameworks.torchtitan.saved import adapter_rank, remarks_on_saved
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults, framework_defaults
from debubble.imports.job import Batch, ImportedJob, batches_in, check_ranks
from debubble.imports.kinds import as_yaml, suggest
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Importer, Settings, UserFacts, imports
from debubble.imports.settings import read_constants, read_settings
from debubble.imports.shell.script_run import SCRIPTS
from debubble.imports.unread import Unread
from debubble.ir import InputError, RunOptions, Schedule
from debubble.models import Model, hub_model

RECOMPUTED = "plan.py: RECOMPUTED_LAYERS"
"""The setting of debubble's own recipe, in place of a checkpointing mode."""
LOCAL_BATCH_SIZE = "training.local_batch_size"
_FLAVORS = {
    "deepseek_v3-671B": "deepseek-v3",
    "llama4-17bx16e": "llama4-scout",
    "llama4-17bx128e": "llama4-maverick",
}
"""torchtitan's models and flavors -> their names in debubble, if they differ."""
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_SAVE_HINT = "start the job once with --debug.save-config-file job.json and import that file"


def read_recipe(path: Path) -> Mapping[str, Any]:
    """The settings of a configuration, or of the constants in debubble's recipe, read without running it.

    Raises:
        InputError: if it is neither.
    """
    if path.suffix in SCRIPTS:
        raise InputError(
            f"{path} is a script: give the TOML that its CONFIG_FILE or --job.config_file names, with its further"
            f" arguments in --args; where that is Python, {_SAVE_HINT}."
        )
    if path.suffix != ".py":
        return dict(_renamed(read_settings(path, other_suffixes=[".py"])))
    constants = read_constants(path)
    if "PARALLELISM" not in constants:
        raise InputError(f"{path} is Python, of which only debubble's own plan.py is read: {_SAVE_HINT}.")
    return dict(_recipe_settings(constants))


def with_command_line(path: Path, command_line: CommandLine | None) -> Mapping[str, Any]:
    """The settings of a configuration or an experiment of Primus, with the command line that starts it."""
    line, settings = command_line or CommandLine({}), read_recipe(path)
    if is_experiment(settings):
        settings = dict(_renamed(read_experiment(settings, path, line)))
    return line.override(settings)


def _renamed(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings by their names since 2025; those of 2024 were in other sections."""
    for name, value in settings.items():
        yield _RENAMED.get(name, name), value


COMPILE, CHECKPOINTING = "compile", "activation_checkpoint"
"""The sections on torch.compile and on activation checkpointing."""
MODES = ("none", "full", "selective", "memory_budget")
"""The values of `activation_checkpoint.mode`."""
_OPTION = f"{CHECKPOINTING}.selective_ac_option"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_COMPILED = ("model", "loss")
MODULES = "parallelism.module_fqns_per_model_part"
OPTIMIZERS = ("AdamW", "Adam", *(name for name in MOMENTS if name not in ("adamw", "adam")))
"""torchtitan's optimizers, and supported ones of forks."""

_RENAMED = {
    "training.batch_size": LOCAL_BATCH_SIZE,
    **{
        f"{section}.{degree}": f"parallelism.{degree}"
        for section in ("training", "experimental")
        for degree in (
            "data_parallel_shard_degree", "data_parallel_replicate_degree", "tensor_parallel_degree",
            "pipeline_parallel_degree", "context_parallel_degree", "pipeline_parallel_schedule",
            "pipeline_parallel_split_points", "enable_async_tensor_parallel",
        )
    },
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.compile": f"{COMPILE}.enable",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "experimental.pipeline_parallel_microbatches": "parallelism.num_pp_microbatches",
}  # fmt: skip
"""Settings of torchtitan's first versions -> their later names."""


def _recipe_settings(constants: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in constants["PARALLELISM"].items():
        yield f"parallelism.{name}", value
    for name, value in constants["TRAINING"].items():
        yield f"training.{name}", value
    for name, value in constants.get("COMPILE", {}).items():
        yield f"{COMPILE}.{name}", value
    yield "training.seq_len", constants["SEQUENCE_LENGTH"]
    number, size = constants["MICRO_BATCHES"], constants["MICRO_BATCH_SIZE"]
    if constants["MODULES"] is None:
        yield "training.local_batch_size", size
        yield "training.global_batch_size", number * size * constants["PARALLELISM"]["data_parallel_shard_degree"]
    else:
        yield "parallelism.module_fqns_per_model_part", constants["MODULES"]
        yield "parallelism.pipeline_parallel_schedule_csv", "schedule.csv"
        yield LOCAL_BATCH_SIZE, number * size
        yield "parallelism.num_pp_microbatches", number
        yield "parallelism.pipeline_parallel_microbatch_size", size
    if constants["RECOMPUTED_LAYERS"]:
        yield RECOMPUTED, sorted(constants["RECOMPUTED_LAYERS"])
    else:
        yield "activation_checkpoint.mode", "none"


DEFAULTS = Defaults(
    "torchtitan",
    {
        name: value
        for name, value in framework_defaults("torchtitan")["values"].items()
        if name.startswith("activation_checkpoint.") or name in (LOCAL_BATCH_SIZE, "training.seq_len")
    },
)
"""torchtitan's defaults for settings without a default in this importer."""
HARMLESS = """
    job.* metrics.* profiling.* lr_scheduler.* checkpoint.* comm.* validation.* debug.* dataloader.* hf_assets.*
    training.dataset* training.steps training.gc_freq training.gc_debug training.seed model.tokenizer*
    model.hf_assets* model.print* model_spec.* optimizer.implementation optimizer.lr optimizer.weight_decay
    experimental.custom_* training.warmup_steps memory_estimation.* training.data_parallel_type
    training.mock_data *sink_level
"""
"""Entries that cost neither time nor memory of a step, besides those of all frameworks."""


def switches(job: Settings, options: RunOptions) -> Iterator[Settings]:
    """Yield torch.compile for jobs without it, and full recomputation for jobs with another mode."""
    compiled = {} if job.get(f"{COMPILE}.enable", False) else {f"{COMPILE}.enable": True}
    mode = job.get(f"{CHECKPOINTING}.mode")
    full = {} if mode in (None, "full") else {f"{CHECKPOINTING}.mode": "full"}
    yield from filter(None, (compiled, full, {**compiled, **full} if compiled and full else {}))


def torchtitan(read: SettingsReader, facts: UserFacts) -> ImportedJob:
    """The job of a torchtitan configuration: degrees, stages, order and recomputation."""
    model = facts.model or _model(read)
    pipeline = read.size("parallelism.pipeline_parallel_degree", 1, instead=facts.pipeline)
    tensor = read.size("parallelism.tensor_parallel_degree", 1)
    context = read.size("parallelism.context_parallel_degree", 1)
    replicas = read.size("parallelism.data_parallel_replicate_degree", 1)
    sharded = max(1, facts.cluster.count // (pipeline * tensor * context * replicas))
    if read.number("parallelism.data_parallel_shard_degree", -1) != -1:
        sharded = read.size("parallelism.data_parallel_shard_degree")
    data = replicas * sharded
    _check_degrees(facts, read, replicas=replicas, sharded=sharded, context=context, tensor=tensor, pipeline=pipeline)
    length = _length(read, facts.sequence_length)
    batch = _batch(read, length, data=data, pipeline=pipeline)
    name = read.text(_SCHEDULE, "1F1B")
    order = "1f1b" if pipeline == 1 else order_of(_SCHEDULE, name, read.text(f"{_SCHEDULE}_csv", ""), read.path)
    module_layers = layers_by_modules(read, MODULES, model) if pipeline > 1 else ()
    layers = module_layers or _split(read, model, pipeline, order)
    expert, expert_tensor = expert_ranks(read, "parallelism.expert_parallel_degree", model, tensor=tensor)
    options = RunOptions(
        micro_batch_size=batch.size,
        sequence_length=length,
        tensor=tensor,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        zero=_zero(read, pipeline) if data * context > 1 else 0,
        optimizer=read.one_of("optimizer.name", "AdamW", OPTIMIZERS).lower(),
        dtype=_dtype(read),
        master_dtype=read.choice("training.dtype", "float32", {"float32": "fp32", "bfloat16": "bf16"}),
        lora=adapter_rank(read),
        sequence_parallel=read.flag("parallelism.enable_sequence_parallel", True) or tensor == 1,
        framework=_framework(read),
    )
    return ImportedJob(
        target="torchtitan",
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=facts.micro_batches or batch.number * batch.passes,
        passes=1 if facts.micro_batches else batch.passes,
        layers=layers,
        order=order,
        strategies=_strategies(read, model),
        defaulted=_defaulted(read, facts),
        warnings=(*_warnings(read), *_computes_in_fp32(read, options, pipeline)),
        rest=Unread.from_reader(read, _remarks(read, options)),
    )


imports.add(
    "torchtitan",
    Importer(
        name="torchtitan", read_job=torchtitan, settings=read_recipe, file="plan.py", defaults=DEFAULTS,
        harmless=HARMLESS, switches=switches, with_arguments=with_command_line, per_pass=(LOCAL_BATCH_SIZE,),
        complete="activation_checkpoint.* comm.* compile.* float8.* mx.* parallelism.* training.*",
        marks="parallelism.* model.flavor model_spec.* training.local_batch_size training.seq_len training.batch_size",
    ),
)  # fmt: skip


_CONVERTERS = ("float8", "mx", "quantize.linear.float8", "quantize.linear.mx")


def _dtype(read: SettingsReader) -> str:
    """The compute dtype: fp8 if linear layers are converted to it."""
    base = read.choice("training.mixed_precision_param", "bfloat16", _DTYPES)
    converted = any(name in _converters(read) for name in _CONVERTERS)
    if converted or read.flag("float8.enable_float8_linear"):
        return "fp8"
    for prefix in ("float8.", "mx.", "quantize."):
        read.mark_unused(prefix)
    return base


def _converters(read: SettingsReader) -> list[str]:
    """The model's converters; a command line has them as one comma-separated word."""
    name = "model.converters"
    value = read.get(name)
    return value.split(",") if isinstance(value, str) else read.texts(name)


def _length(read: SettingsReader, instead: int | None) -> int:
    """Tokens per sequence, by the setting of the development version or of 0.3.0, unless the user gives them."""
    name = "training.max_context_length"
    return read.size(name if read.get(name) is not None else "training.seq_len", instead=instead)


def _batch(read: SettingsReader, length: int, *, data: int, pipeline: int) -> Batch:
    """The batch of a step and replica.

    A pipeline splits the local batch; without one it is a micro-batch.  Gradients accumulate over several passes up to
    the global batch.  torchtitan's development version counts tokens instead of sequences.
    """
    tokens, count = "training.num_tokens_per_microbatch_per_dp_rank", "parallelism.num_pp_microbatches"
    if read.get(tokens) is not None:
        size = max(1, read.size(tokens) // length)
        number = read.size(count, 1)
        local = size * number if pipeline > 1 else size
        name, step = "training.num_tokens_per_train_step", read.number("training.num_tokens_per_train_step", -1)
        step = read.size(name) // length if step >= 0 else -1
    else:
        name, step = "training.global_batch_size", read.number("training.global_batch_size", -1)
        step = read.size(name) if step >= 0 else -1
        size, number = _micro_batches(read, pipeline)
        local = size * number
    passes = 1 if step < 0 else batches_in(step, local * data, read.path, name=name)
    return Batch(size, number, passes) if pipeline > 1 else Batch(size, passes, 1)


def _micro_batches(read: SettingsReader, pipeline: int) -> tuple[int, int]:
    """Sequences per micro-batch and micro-batches in a local batch."""
    count, size = "parallelism.num_pp_microbatches", "parallelism.pipeline_parallel_microbatch_size"
    if pipeline == 1:
        return read.size(LOCAL_BATCH_SIZE), 1
    if read.get(count) is not None:
        number = read.size(count)
        if size in read:
            read.skip(LOCAL_BATCH_SIZE)
            return read.size(size), number
        return batches_in(read.size(LOCAL_BATCH_SIZE), number, read.path, name=LOCAL_BATCH_SIZE), number
    return read.size(size, 1), batches_in(
        read.size(LOCAL_BATCH_SIZE), read.size(size, 1), read.path, name=LOCAL_BATCH_SIZE
    )


def _zero(read: SettingsReader, pipeline: int) -> int:
    """The ZeRO level of FSDP, which reduces gradients once with a pipeline, else after every micro-batch."""
    if pipeline > 1:
        _reshards(read)
        return 1
    return 2 if _reshards(read) == "never" else 3


def _reshards(read: SettingsReader) -> str:
    return read.one_of("parallelism.fsdp_reshard_after_forward", "default", ("default", "always", "never"))


def _model(read: SettingsReader) -> Model:
    """The model without vision towers and multi-token-prediction layers, which torchtitan's models lack."""
    read.skip("model_spec.model.")
    name, flavor = (read.text(f"model.{key}", "") or read.text(f"model_spec.{key}", "") for key in ("name", "flavor"))
    short = {"llama3": "llama3.1"}.get(name, name)
    known = hub_model(_FLAVORS.get(f"{name}-{flavor}", f"{short}-{flavor}")) or flavor_model(name, flavor)
    if known is None:
        if not name:
            raise InputError(f"{read.path} does not name its model: give it with --model.")
        flavors = flavors_of(name)
        near = suggest(flavor, flavors)
        hint = f"; known flavors are {', '.join(flavors)}{near}" if flavors else ""
        raise InputError(
            f"{read.path} names the model '{name}' '{flavor}', which is not known here{hint}: give it with --model."
        )
    text = known if known.vision is None else Model.from_hf(known.config["text_config"])
    layers = read.size("model.n_layers", text.layers)
    if layers != text.layers:
        text = Model.from_hf({**text.config, "num_hidden_layers": layers})
    return Model.from_hf({**text.config, "num_nextn_predict_layers": 0}) if text.mtp_layers else text


def _split(read: SettingsReader, model: Model, pipeline: int, order: str | Schedule) -> tuple[int, ...]:
    """Layers per stage by torchtitan's default split, or by the split points of its first versions."""
    points = read.get("parallelism.pipeline_parallel_split_points", [])
    if points not in ([], ""):
        return _layers_between(points, model.layers, read)
    first = read.count("parallelism.pipeline_parallel_first_stage_less_layers", 1)
    last = read.count("parallelism.pipeline_parallel_last_stage_less_layers", 1)
    setting = "parallelism.pipeline_parallel_layers_per_stage"
    per_stage = read.size(setting) if read.get(setting) is not None else 0
    stages = -(-(model.layers + first + last) // per_stage) if per_stage else pipeline * chunks_of(order)
    if stages % pipeline:
        raise InputError(
            f"{read.path}: pipeline_parallel_layers_per_stage {per_stage} makes {stages} stages, which cannot be"
            f" divided over {pipeline} pipeline devices."
        )
    return balanced_layers(model.layers, stages, first_less=first, last_less=last)


def _layers_between(points: object, layers: int, read: SettingsReader) -> tuple[int, ...]:
    """Layers per stage for split points such as `layers.16`, the first modules of later stages."""
    names = points if isinstance(points, list) else str(points).split(",")
    starts = [str(name).strip().removeprefix("layers.") for name in names]
    bounds = [0, *(int(start) for start in starts if start.isdigit()), layers]
    if len(bounds) != len(starts) + 2 or bounds != sorted(set(bounds)):
        raise InputError(f"{read.path}: pipeline_parallel_split_points is {points!r}, which is no list of layers.N.")
    return tuple(end - begin for begin, end in pairwise(bounds))


def _strategies(read: SettingsReader, model: Model) -> dict[int, tuple[str, str]]:
    planned = read.numbers(RECOMPUTED)
    if planned:
        return layer_strategies(planned)
    policy = _policy(read)
    if policy == "full":
        return layer_strategies(range(model.layers))
    if policy.isdigit():
        interval = int(policy) or 1
        return layer_strategies(range(interval - 1, model.layers, interval))
    return layer_strategies(range(model.layers), "norm+activation+multiply") if policy == "op" else {}


def _policy(read: SettingsReader) -> str:
    """`none`, `full`, `op` (selective by operators), `memory_budget`, or a number n (every n-th layer).

    A configuration that torchtitan saved does not name its policy, which is identified by its settings.
    """
    marks = {"force_recompute_mm_shapes_by_fqns": "op", "memory_budget": "memory_budget", "preserve_rng_state": "full"}
    section = CHECKPOINTING
    specified = [name for name in (f"{section}.mode", _OPTION) if name in read.settings]
    if not specified and any(name.startswith(section) for name in read.settings) and read.path.suffix == ".json":
        saved = [policy for name, policy in marks.items() if read.get(f"{section}.{name}") is not None]
        read.mark_unused(f"{section}.")
        return next(iter(saved), "none")
    mode = read.one_of(f"{section}.mode", "none", MODES)
    if mode != "selective":
        return mode
    option = read.get(_OPTION, "2")
    if isinstance(option, bool) or not isinstance(option, int | str) or not re.fullmatch(r"op|\d+", str(option)):
        raise read.refusal(
            _OPTION, f"is {as_yaml(option)}, and torchtitan has 'op' and numbers such as '2', for every 2nd layer"
        )
    return str(option)


def _framework(read: SettingsReader) -> str:
    """The framework with the traits that the file changes; without torch.compile no operators are fused."""
    components = read.texts(f"{COMPILE}.components", _COMPILED)
    if other := [name for name in components if name not in _COMPILED]:
        raise read.refusal(f"{COMPILE}.components", f"has '{other[0]}', and torchtitan compiles {', '.join(_COMPILED)}")
    compiled = components if read.flag(f"{COMPILE}.enable") else []
    eager = None if "model" in compiled else False
    replicated_logits = [read.flag(f"{section}.disable_loss_parallel") for section in ("parallelism", "training")]
    overlaps = [read.flag(f"{section}.enable_async_tensor_parallel") for section in ("parallelism", COMPILE)]
    return framework_with(
        "torchtitan",
        compiled=eager,
        fused_activation=eager,
        fused_loss=None if "loss" in compiled else False,
        loss_parallel=False if any(replicated_logits) else None,
        tensor_overlap=True if any(overlaps) else None,
    )


def _defaulted(read: SettingsReader, user: UserFacts) -> dict[str, str]:
    """The facts that come from torchtitan's defaults -> the source of the default."""
    facts: dict[str, tuple[str, ...]] = {
        "dtype": ("training.mixed_precision_param",),
        "gradients": ("training.mixed_precision_reduce",),
        "sequence_parallel": ("parallelism.enable_sequence_parallel",),
        "no torch.compile": (f"{COMPILE}.enable",),
        "zero": ("parallelism.fsdp_reshard_after_forward", "parallelism.data_parallel_shard_degree"),
        "selective checkpointing of every 2nd layer": (
            "activation_checkpoint", "activation_checkpoint.mode", RECOMPUTED,
            *(name for name in read.settings if name.startswith("activation_checkpoint.")),
        ),
        "local batches of 8": (LOCAL_BATCH_SIZE, "training.num_tokens_per_microbatch_per_dp_rank", RECOMPUTED),
    }  # fmt: skip
    if user.sequence_length is None:
        facts["sequences of 2048"] = ("training.seq_len", "training.max_context_length")
    return {
        fact: source
        for fact, source in read.defaulted(**facts).items()
        if "activation_checkpoint" not in facts[fact] or "activation_checkpoint" not in read.settings
    }


_OFFLOAD = "training.enable_cpu_offload"


def _warnings(read: SettingsReader) -> Iterator[str]:
    """Sentences on unpredicted settings with a large effect."""
    yield from _reduction(read)
    if read.flag(_OFFLOAD):
        yield (
            f"{_OFFLOAD} is not in the prediction: parameters, gradients and optimizer states are counted on devices,"
            " and their copies from the host and the optimizer's steps there are not."
        )
    known = (*_CONVERTERS, "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
    if unknown := [name for name in _converters(read) if name not in known]:
        yield f"model.converters has {', '.join(unknown)}, which is not in the prediction{suggest(unknown[0], known)}."


def _computes_in_fp32(read: SettingsReader, options: RunOptions, pipeline: int) -> Iterator[str]:
    """A sentence on jobs that the versions with TOML files compute in fp32, as no FSDP sets another dtype.

    Source: torchtitan 0.2.2, distributed/utils.py, `maybe_enable_amp`.
    """
    undivided = options.data * options.context == 1 and (pipeline > 1 or options.tensor > 1)
    if undivided and read.path.suffix == ".toml" and options.dtype == "bf16" and options.master_dtype == "fp32":
        yield (
            "Up to 0.2, torchtitan computes in fp32 where FSDP divides nothing (no data or context parallelism), and"
            " bf16 is predicted, as later versions compute: set training.dtype to bfloat16, or divide the data."
        )


def _reduction(read: SettingsReader) -> Iterator[str]:
    """A sentence if gradients are reduced in another dtype than fp32, as in forks."""
    name = "training.mixed_precision_reduce"
    if read.one_of(name, "float32", tuple(_DTYPES)) != "float32":
        yield f"{name} is {read.get(name)}, and the prediction counts on float32."


def _check_degrees(facts: UserFacts, read: SettingsReader, **degrees: int) -> None:
    """Raise InputError if torchtitan would not start because its degrees do not match the world size."""
    names = {"replicas": "data_parallel_replicate", "sharded": "data_parallel_shard"}
    check_ranks(
        facts.cluster,
        read.path,
        {f"{names.get(name, f'{name}_parallel')}_degree": degree for name, degree in degrees.items()},
    )


def _remarks(read: SettingsReader, options: RunOptions) -> Iterator[str]:
    read.get(_OPTION)
    policy = _policy(read)
    if policy == "op":
        yield (
            "Selective checkpointing by operators is predicted as that of norms, activation functions and multiplies:"
            " every second product, which it recomputes too, is predicted to be kept."
        )
    if policy == "memory_budget":
        yield "activation_checkpoint.memory_budget: what the compiler recomputes is predicted to be kept."
    if read.size("parallelism.data_parallel_replicate_degree", 1) > 1:
        yield "Replicas that FSDP does not divide (data_parallel_replicate_degree) are predicted as divided ones."
    yield from remarks_on_saved(read, options)
