"""Imports NeMo Automodel's YAML recipes, including the partial ones that debubble exports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from debubble.costs import framework_of_options, framework_with
from debubble.frameworks.automodel.export import resharding
from debubble.frameworks.torch.shared_settings import (
    balanced_layers,
    chunks_of,
    expert_ranks,
    layer_strategies,
    layers_by_modules,
    order_of,
)
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults
from debubble.imports.job import Batch, ImportedJob, batches_in, check_ranks
from debubble.imports.kinds import NUMBER, as_yaml, suggest
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Importer, Settings, UserFacts, imports
from debubble.imports.settings import read_settings
from debubble.imports.unread import Unread
from debubble.ir import InputError, RunOptions, Schedule
from debubble.models import Model, hub_model

_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "FusedAdam": "adamw"}
_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16", "bf16": "bf16", "fp16": "fp16",
    "fp32": "fp32",
}  # fmt: skip
MODULES = "distributed.pipeline.module_fqns_per_model_part"
_LENGTHS = ("sequence_length", "dataset.seq_length", "dataset.seq_len", "packed_sequence.packed_sequence_size")

DEFAULTS = Defaults("Automodel")
"""The recipes' base classes: weights in bf16, FSDP2, one sequence per batch."""
HARMLESS = """
    recipe recipe.* dist_env.* rng.* checkpoint.* loss_fn.* tokenizer.* validation.* validation_dataset.*
    validation_dataloader.* packed_sequence.split* logger.* wandb.* lr_scheduler.* dataloader.* dataset.*
    step_scheduler.ckpt_* step_scheduler.val_* step_scheduler.num_epochs step_scheduler.max_steps
    step_scheduler.save_* model._target_ model.config._target_ model.trust_remote_code
    model.config.trust_remote_code distributed.backend optimizer.foreach peft._target_ peft.alpha peft.dropout
    peft.dropout_position ci.* benchmark.* step_scheduler.gc_every_steps
"""
"""Entries that cost neither time nor memory of a step, besides those of all frameworks."""

_OLD_PREFIXES = {
    "autopipeline.": "distributed.pipeline.",
    "parallelizer.activation_checkpointing": "distributed.activation_checkpointing",
    "moe_config.activation_checkpointing": "distributed.activation_checkpointing",
    "parallelizer.": "distributed.moe.",
    "moe_config.": "distributed.moe.",
    "distributed_config.": "distributed.",
}
"""Prefixes of entries in old recipes -> the current ones."""
_STRATEGIES = {"FSDP2": "fsdp2", "MegatronFSDP": "megatron_fsdp", "DDP": "ddp"}
"""Prefix of the strategy's class in old recipes -> its current name."""


def read_recipe(path: Path, command_line: CommandLine | None = None) -> Settings:
    """The settings of a recipe and of the command line that starts it, by the names of current recipes."""
    settings = (command_line or CommandLine({})).override(read_settings(path))
    settings = {name: _converted(value) for name, value in settings.items()}
    return dict(entry for name, value in settings.items() for entry in _renamed_entry(name, value))


def _converted(value: Any) -> Any:
    """A value after the conversion of strings by Automodel's loader.  Source: components/config/loader.py."""
    if not isinstance(value, str):
        return value
    words = {"none": None, "None": None, "true": True, "false": False}
    if value in words:
        return words[value]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def _renamed_entry(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The entry by its current name; the classes of old sections only determine the strategy."""
    old = next((prefix for prefix in _OLD_PREFIXES if name.startswith(prefix)), "")
    if name in ("distributed._target_", "distributed_config._target_"):
        word = str(value).rpartition(".")[2]
        known = (strategy for start, strategy in _STRATEGIES.items() if word.startswith(start))
        yield "distributed.strategy", next(known, word)
    elif not (old and name.endswith("._target_")):
        yield _OLD_PREFIXES.get(old, "") + name.removeprefix(old), value


def switches(job: Settings, options: RunOptions) -> Iterator[Settings]:
    """Yield settings that shard gradients after every micro-batch, and that send tokens once per device (DeepEP)."""
    framework = framework_of_options(options.framework)
    divided = {"distributed.defer_fsdp_grad_sync": False} if framework.defers_gradients else {}
    once: dict[str, Any] = {}
    if options.expert > 1 and not framework.dispatches_once:
        once = {"model.backend.dispatcher": "deepep", "model.backend.enable_deepep": True}
    yield from filter(None, (divided, once, {**divided, **once} if divided and once else {}))


def automodel(read: SettingsReader, facts: UserFacts) -> ImportedJob:
    """The job of an Automodel recipe: degrees, stages, order and recomputation."""
    _check_recipe(read)
    model = facts.model or _model(read)
    pipeline = read.size("distributed.pp_size", 1, instead=facts.pipeline)
    tensor, context = read.size("distributed.tp_size", 1), read.size("distributed.cp_size", 1)
    data = read.size("distributed.dp_size", max(1, facts.cluster.count // (pipeline * tensor * context)))
    check_ranks(facts.cluster, read.path, {"pp_size": pipeline, "tp_size": tensor, "cp_size": context, "dp_size": data})
    batch = _batch(read, data=data, pipeline=pipeline)
    order = "1f1b" if pipeline == 1 else _order(read)
    module_layers = layers_by_modules(read, MODULES, model) if pipeline > 1 else ()
    layers = module_layers or _split(read, model.layers, pipeline, order)
    length_names = [name for name in _LENGTHS if read.count(name)]
    length = facts.sequence_length or next(map(read.size, length_names), None)
    if length is None:
        raise InputError(f"{read.path} does not say how long its sequences are: give --sequence-length.")
    expert, expert_tensor = expert_ranks(read, "distributed.ep_size", model, tensor=tensor)
    zero = _zero(read, pipeline, expert) if data * context > 1 else 0
    micro_batches = facts.micro_batches or batch.number * batch.passes
    options = RunOptions(
        micro_batch_size=batch.size,
        sequence_length=length,
        tensor=tensor,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        zero=zero,
        optimizer=_optimizer(read),
        dtype=_dtype(read),
        master_dtype=_master_dtype(read),
        moment_dtype="bf16" if all(_dtype_of(read, name, "fp32") == "bf16" for name in _MOMENTS) else "fp32",
        lora=_lora(read),
        quantize=_quantize(read),
        sequence_parallel=read.flag("distributed.sequence_parallel") or tensor == 1,
        framework=framework_with(
            "automodel",
            gradient_bytes=2 if _reduces_in_16_bits(read) else None,
            dispatches_once=None if _dispatches_once(read) else False,
            keeps_remainders=True if _keeps_remainders(read) else None,
            defers_gradients=True if zero == 3 and micro_batches > 1 and _defers_gradients(read) else None,
        ),
    )
    checkpointing = _checkpointing(read) != "none"
    return ImportedJob(
        target="automodel",
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=micro_batches,
        passes=1 if facts.micro_batches else batch.passes,
        layers=layers,
        order=order,
        strategies=layer_strategies(range(model.layers)) if checkpointing else {},
        gradients="bf16" if _reduces_in_16_bits(read) else "fp32",
        defaulted=read.defaulted(
            dtype=_DTYPE_NAMES,
            gradients=("distributed.mp_policy.reduce_dtype",),
            sequence_parallel=("distributed.sequence_parallel",),
            zero=("distributed.strategy", resharding(expert)),
        ),
        warnings=tuple(_warnings(read)),
        rest=Unread.from_reader(read, _remarks(read, options, pipeline=pipeline)),
    )


imports.add(
    "automodel",
    Importer(
        name="automodel", read_job=automodel, settings=read_recipe, file="plan.yaml", defaults=DEFAULTS,
        harmless=HARMLESS, switches=switches, with_arguments=read_recipe,
        marks="step_scheduler.* distributed.* model.pretrained_model_name_or_path",
    ),
)  # fmt: skip


_RECIPES = (
    "TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction", "FinetuneRecipeForVLM",
    "FinetuneRecipeForMultimodal", "PretrainRecipeForMultimodal",
)  # fmt: skip
"""The recipes whose step is forward, next-token loss, backward and optimizer."""


def _check_recipe(read: SettingsReader) -> None:
    """Raise InputError for a recipe whose step has a teacher, a second encoder, a draft model or another loss."""
    entry = "recipe" if read.get("recipe") is not None else "recipe._target_"
    name = read.text(entry, _RECIPES[0]).rpartition(".")[2]
    if name not in _RECIPES:
        raise InputError(
            f"{read.path}: {entry} {name} does more than train on the next token: to predict that alone, give --args"
            f" '--recipe {_RECIPES[0]}'."
        )


_COMPUTE_DTYPE = "distributed.mp_policy.param_dtype"
"""The setting of the compute dtype; Automodel's default policy has bf16."""
_STORED_DTYPES = ("model.torch_dtype", "model.dtype", "model.config.torch_dtype")
"""Settings of the dtype of stored weights: the checkpoint's if they are absent or `auto`, and the compute dtype of a
policy that has none."""
_DTYPE_NAMES = (_COMPUTE_DTYPE, *_STORED_DTYPES)


def _dtype(read: SettingsReader) -> str:
    if read.flag("fp8.enabled") or read.one_of("model.backend.te_fp8.recipe", "", ("current", "block", "mxfp8")):
        return "fp8"
    _stored_dtype(read)
    has_policy = any(name.startswith("distributed.mp_policy.") for name in read.settings)
    if has_policy and read.get(_COMPUTE_DTYPE) is None:
        return _stored_dtype(read)
    return read.choice(_COMPUTE_DTYPE, "bfloat16", _DTYPES)


def _stored_dtype(read: SettingsReader) -> str:
    specified = [name for name in _STORED_DTYPES if read.get(name) not in (None, "auto")]
    return read.choice(specified[0], "bfloat16", _DTYPES) if specified else "bf16"


def _dtype_of(read: SettingsReader, name: str, default: str) -> str:
    """The dtype of an entry, or a default if it is missing."""
    return default if read.get(name) is None else read.choice(name, "", _DTYPES)


_MOMENTS = ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype")
"""Settings of the dtype of Transformer Engine's moments."""


def _master_dtype(read: SettingsReader) -> str:
    """The dtype of master weights: that of stored weights, unless Transformer Engine keeps separate masters."""
    masters = _optimizer_class(read) == "FusedAdam" and read.flag("optimizer.master_weights", True)
    stored = _stored_dtype(read)
    return "bf16" if stored == "bf16" and _dtype(read) != "fp32" and not (masters or _lora(read)) else "fp32"


def _keeps_remainders(read: SettingsReader) -> bool:
    """Tell whether Transformer Engine's Adam stores only the 2 low bytes of master weights, next to bf16 weights."""
    remainders, masters = read.flag("optimizer.store_param_remainders"), read.flag("optimizer.master_weights", True)
    return _optimizer_class(read) == "FusedAdam" and remainders and masters and _stored_dtype(read) == "bf16"


def _lora(read: SettingsReader) -> int:
    """The rank of the adapters, 8 if the recipe does not set it; 0: full fine-tuning."""
    rank = read.size("peft.dim", 8)
    return rank if any(name.startswith("peft.") for name in read.settings) else 0


def _quantize(read: SettingsReader) -> str | None:
    """The format of bitsandbytes' frozen weights."""
    if not read.flag("quantization.load_in_4bit"):
        return None
    double = read.flag("quantization.bnb_4bit_use_double_quant")
    read.skip("quantization.")
    return "nf4-dq" if double else "nf4"


def _split(read: SettingsReader, layers: int, pipeline: int, order: str | Schedule) -> tuple[int, ...]:
    """Layers per stage, divided evenly into the number of stages that follows from `layers_per_stage`."""
    setting = "distributed.pipeline.layers_per_stage"
    if pipeline == 1:
        return (layers,)
    if read.get(setting) is None:
        return balanced_layers(layers, pipeline * chunks_of(order), first_less=0, last_less=0)
    per_stage = read.size(setting)
    stages = -(-layers // per_stage)
    rounding = read.one_of("distributed.pipeline.round_virtual_stages_to_pp_multiple", "", ("up", "down"))
    if rounding in ("up", "down"):
        stages += -stages % pipeline if rounding == "up" else -(stages % pipeline)
    alone = order in ("1f1b", "gpipe")
    if stages % pipeline or not stages or (stages == pipeline) != alone:
        raise InputError(
            f"{read.path}: {setting} is {per_stage}, which makes {stages} stages of {layers} layers over {pipeline}"
            f" pipeline devices, and the schedule needs {'one' if alone else 'two or more'} per device: choose another."
        )
    return balanced_layers(layers, stages, first_less=0, last_less=0)


def _order(read: SettingsReader) -> str | Schedule:
    name = "distributed.pipeline.pp_schedule"
    return order_of(name, read.text(name, "1F1B"), read.text(f"{name}_csv", ""), read.path)


def _batch(read: SettingsReader, *, data: int, pipeline: int) -> Batch:
    """The batch of a step and replica; a pipeline splits the local batch, otherwise it is one micro-batch."""
    local_batch, global_batch = "step_scheduler.local_batch_size", "step_scheduler.global_batch_size"
    if pipeline == 1:
        size = read.size(local_batch, 1)
        batch = size * data
        return Batch(size, batches_in(read.size(global_batch, batch), batch, read.path, name=global_batch), 1)
    size = read.size("distributed.pipeline.pp_microbatch_size", 1)
    number = batches_in(read.size(local_batch, size), size, read.path, name=local_batch)
    batch = size * number * data
    return Batch(size, number, batches_in(read.size(global_batch, batch), batch, read.path, name=global_batch))


def _zero(read: SettingsReader, pipeline: int, expert: int) -> int:
    """The ZeRO level of FSDP, which by default keeps weights gathered with pipelines and expert parallelism."""
    if _strategy(read) == "ddp":
        return 0
    if pipeline > 1:
        return 1
    if read.flag(resharding(expert), expert == 1):
        return 3
    return 1 if _defers_gradients(read) else 2


def _defers_gradients(read: SettingsReader) -> bool:
    return read.flag("distributed.defer_fsdp_grad_sync", True)


def _strategy(read: SettingsReader) -> str:
    """The canonical name of the strategy, ignoring case.  Source: components/distributed/config.py."""
    entry = "distributed.strategy"
    word = read.text(entry, "fsdp2").lower()
    if word not in _STRATEGY_NAMES:
        near = suggest(word, _STRATEGY_NAMES)
        raise read.refusal(entry, f"is '{word}', which is none of {', '.join(_STRATEGY_NAMES)}{near}")
    return _STRATEGY_NAMES[word]


_STRATEGY_NAMES = {
    "fsdp2": "fsdp2", "megatron_fsdp": "megatron_fsdp", "megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp",
    "ddp": "ddp",
}  # fmt: skip
"""Automodel's spellings of strategies -> canonical names."""


def _checkpointing(read: SettingsReader) -> str:
    """The recomputation mode: none, full or selective.  Source: recipes/_dist_utils.py."""
    name = "distributed.activation_checkpointing"
    value = read.get(name, False)
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).lower()
    words = {"none": ("off", "disabled", "no"), "full": ("on", "full", "enabled", "yes"), "selective": ("selective",)}
    for mode, spellings in words.items():
        if word in spellings:
            return mode
    raise read.refusal(name, f"is {as_yaml(value)}, which is none of true, false, full and selective")


def _model(read: SettingsReader) -> Model:
    entries = [f"model.{prefix}pretrained_model_name_or_path" for prefix in ("", "config.")]
    named = {entry: name for entry in entries if (name := read.text(entry, ""))}
    if not named:
        raise InputError(f"{read.path} names no model: give it with --model.")
    entry, name = next(iter(named.items()))
    model = hub_model(name)
    if model is None:
        raise InputError(
            f"{read.path}: {entry} names the model '{name}', which is not known here: give it with --model."
        )
    return model


def _torch_names(dtype: str) -> tuple[str, str]:
    name = next(name for name, priced in _DTYPES.items() if priced == dtype.replace("fp8", "bf16"))
    return name, f"torch.{name}"


def _optimizer(read: SettingsReader) -> str:
    name = _optimizer_class(read)
    if name == "SGD":
        return "momentum" if read.entry("optimizer.momentum", NUMBER) else "sgd"
    return _OPTIMIZERS.get(name, "adamw")


def _optimizer_class(read: SettingsReader) -> str:
    return read.text("optimizer._target_", "torch.optim.AdamW").rpartition(".")[2]


def _dispatches_once(read: SettingsReader) -> bool:
    """Tell whether tokens are dispatched by DeepEP or HybridEP, the default."""
    enabled = read.flag("model.backend.enable_deepep", True)
    return read.one_of("model.backend.dispatcher", "deepep", _DISPATCHERS) != "torch" and enabled


_DISPATCHERS = ("torch", "deepep", "hybridep", "uccl_ep", "mok")
"""Source: components/models/common/utils.py, BackendConfig."""


def _reduces_in_16_bits(read: SettingsReader) -> bool:
    """Tell whether gradients are summed in bf16."""
    return _dtype_of(read, "distributed.mp_policy.reduce_dtype", "fp32") == "bf16"


def _warnings(read: SettingsReader) -> Iterator[str]:
    """Sentences on settings that are predicted as other values."""
    if _optimizer_class(read) not in {*_OPTIMIZERS, "SGD"}:
        yield f"optimizer._target_ is {_optimizer_class(read)}, and the prediction counts on AdamW."
    read.text("distributed.mp_policy._target_", "")
    yield from read.assume("distributed.mp_policy._target_", "torch.distributed.fsdp.MixedPrecisionPolicy")
    if _strategy(read) == "megatron_fsdp":
        yield "distributed.strategy is megatron_fsdp, and the prediction counts on fsdp2."
    if _checkpointing(read) == "selective":
        yield "distributed.activation_checkpointing is selective, and predicted as full: it keeps more, and is faster."


def _remarks(read: SettingsReader, options: RunOptions, *, pipeline: int) -> Iterator[str]:
    if pipeline == 1:
        read.mark_unused("distributed.pipeline.")
    for section in ("compile", "fp8"):
        if read.settings.get(f"{section}.enabled", False) is False:
            read.mark_unused(f"{section}.")
    if options.lora and not read.flag("peft.match_all_linear", True):
        yield "peft.match_all_linear is off, and the prediction counts on adapters of all linear layers."
    if options.quantize and read.one_of("quantization.bnb_4bit_quant_type", "nf4", ("nf4", "fp4")) != "nf4":
        yield "quantization.bnb_4bit_quant_type is fp4, and the prediction counts on nf4."
    if options.master_dtype == "bf16" and options.moment_dtype == "fp32" and _optimizer_class(read) == "FusedAdam":
        yield "Transformer Engine's moments are in fp32, and predicted in bf16 as the weights are."
    policy = "distributed.mp_policy."
    _dtype_of(read, f"{policy}output_dtype", "")
    read.flag(f"{policy}cast_forward_inputs", True)
    yield from read.assume(f"{policy}output_dtype", *_torch_names(options.dtype))
    yield from read.assume(f"{policy}reduce_dtype", *_torch_names("fp32"), *_torch_names("bf16"))
    yield from read.assume(f"{policy}cast_forward_inputs", True)
