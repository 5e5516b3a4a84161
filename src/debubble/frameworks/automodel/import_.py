"""NeMo Automodel: its YAML recipe, or the part of one that debubble writes."""

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
from debubble.imports.kinds import NUMBER, meant, shown
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


_OLDER_NAMES = {
    "autopipeline.": "distributed.pipeline.",
    "parallelizer.activation_checkpointing": "distributed.activation_checkpointing",
    "moe_config.activation_checkpointing": "distributed.activation_checkpointing",
    "parallelizer.": "distributed.moe.",
    "moe_config.": "distributed.moe.",
    "distributed_config.": "distributed.",
}
"""How names of entries begin in older recipes -> how they do in newer ones."""
_STRATEGIES = {"FSDP2": "fsdp2", "MegatronFSDP": "megatron_fsdp", "DDP": "ddp"}
"""How the class begins that is the strategy in older recipes -> its name in newer ones."""


def read_recipe(path: Path, given: CommandLine | None = None) -> Settings:
    """The settings of a recipe and of the command line that starts it, by the names that newer recipes have."""
    settings = (given or CommandLine({})).changed(read_settings(path))
    settings = {name: _converted(value) for name, value in settings.items()}
    return {newer: each for name, value in settings.items() for newer, each in _newer(name, value)}


def _converted(value: Any) -> Any:
    """A value as Automodel's loader makes one of a word.  Source: components/config/loader.py, translate_value."""
    if not isinstance(value, str):
        return value
    words = {"none": None, "None": None, "true": True, "false": False}
    if value in words:
        return words[value]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


def _newer(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The entry by its newer name; the classes of older sections say no more than the strategy."""
    older = next((each for each in _OLDER_NAMES if name.startswith(each)), "")
    if name in ("distributed._target_", "distributed_config._target_"):
        word = str(value).rpartition(".")[2]
        yield "distributed.strategy", next((_STRATEGIES[each] for each in _STRATEGIES if word.startswith(each)), word)
    elif not (older and name.endswith("._target_")):
        yield _OLDER_NAMES.get(older, "") + name.removeprefix(older), value


def switches(job: Settings, options: RunOptions) -> Iterator[Settings]:
    """Yield gradients that are divided after every micro-batch, and tokens that travel once to a device (DeepEP)."""
    framework = framework_of_options(options.framework)
    divided = {"distributed.defer_fsdp_grad_sync": False} if framework.defers_gradients else {}
    once: dict[str, Any] = {}
    if options.expert > 1 and not framework.dispatches_once:
        once = {"model.backend.dispatcher": "deepep", "model.backend.enable_deepep": True}
    yield from filter(None, (divided, once, {**divided, **once} if divided and once else {}))


def automodel(read: SettingsReader, given: UserFacts) -> ImportedJob:
    """Degrees, stages, order and recomputation of an Automodel recipe."""
    _check_recipe(read)
    model = given.model or _model(read)
    pipeline = read.size("distributed.pp_size", 1, instead=given.pipeline)
    tensor, context = read.size("distributed.tp_size", 1), read.size("distributed.cp_size", 1)
    data = read.size("distributed.dp_size", max(1, given.cluster.count // (pipeline * tensor * context)))
    check_ranks(given.cluster, read.path, {"pp_size": pipeline, "tp_size": tensor, "cp_size": context, "dp_size": data})
    batch = _batch(read, data=data, pipeline=pipeline)
    order = "1f1b" if pipeline == 1 else _order(read)
    parts = layers_by_modules(read, MODULES, model) if pipeline > 1 else ()
    layers = parts or _split(read, model.layers, pipeline, order)
    said = [name for name in _LENGTHS if read.count(name)]
    length = given.sequence_length or next(map(read.size, said), None)
    if length is None:
        raise InputError(f"{read.path} does not say how long its sequences are: give --sequence-length.")
    expert, expert_tensor = expert_ranks(read, "distributed.ep_size", model, tensor=tensor)
    zero = _zero(read, pipeline, expert) if data * context > 1 else 0
    micro_batches = given.micro_batches or batch.number * batch.passes
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
        passes=1 if given.micro_batches else batch.passes,
        layers=layers,
        order=order,
        strategies=layer_strategies(range(model.layers)) if checkpointing else {},
        gradients="bf16" if _reduces_in_16_bits(read) else "fp32",
        unsaid=read.unsaid(
            dtype=_DTYPE_NAMES,
            gradients=("distributed.mp_policy.reduce_dtype",),
            sequence_parallel=("distributed.sequence_parallel",),
            zero=("distributed.strategy", resharding(expert)),
        ),
        warnings=tuple(_warnings(read)),
        rest=Unread.of(read, _remarks(read, options, pipeline=pipeline)),
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
"""The recipes whose step is forward, loss on the next token, backward and optimizer."""


def _check_recipe(read: SettingsReader) -> None:
    """Raise InputError for a recipe whose step has a teacher, a second encoder, a draft model or another loss."""
    entry = "recipe" if read.get("recipe") is not None else "recipe._target_"
    name = read.text(entry, _RECIPES[0]).rpartition(".")[2]
    if name not in _RECIPES:
        raise InputError(
            f"{read.path}: {entry} {name} does more than train on the next token: to predict that alone, give --args"
            f" '--recipe {_RECIPES[0]}'."
        )


_COMPUTED = "distributed.mp_policy.param_dtype"
"""The dtype of computing: bf16 by the policy that Automodel has where a recipe gives none."""
_STORED = ("model.torch_dtype", "model.dtype", "model.config.torch_dtype")
"""Settings that say the dtype of stored weights, which is that of checkpoints where they are absent or `auto`; a policy
without a dtype computes in it."""
_DTYPE_NAMES = (_COMPUTED, *_STORED)


def _dtype(read: SettingsReader) -> str:
    if read.flag("fp8.enabled") or read.one_of("model.backend.te_fp8.recipe", "", ("current", "block", "mxfp8")):
        return "fp8"
    _stored(read)
    has_policy = any(name.startswith("distributed.mp_policy.") for name in read.settings)
    if has_policy and read.get(_COMPUTED) is None:
        return _stored(read)
    return read.choice(_COMPUTED, "bfloat16", _DTYPES)


def _stored(read: SettingsReader) -> str:
    said = [name for name in _STORED if read.get(name) not in (None, "auto")]
    return read.choice(said[0], "bfloat16", _DTYPES) if said else "bf16"


def _dtype_of(read: SettingsReader, name: str, default: str) -> str:
    """The dtype that an entry says, or a default."""
    return default if read.get(name) is None else read.choice(name, "", _DTYPES)


_MOMENTS = ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype")
"""Settings that say the dtype of Transformer Engine's moments."""


def _master_dtype(read: SettingsReader) -> str:
    """The dtype of the weights that the optimizer steps: that of stored ones, but for Transformer Engine's masters."""
    masters = _optimizer_class(read) == "FusedAdam" and read.flag("optimizer.master_weights", True)
    return "bf16" if _stored(read) == "bf16" and _dtype(read) != "fp32" and not (masters or _lora(read)) else "fp32"


def _keeps_remainders(read: SettingsReader) -> bool:
    """Tell whether Transformer Engine's Adam keeps 2 bytes of each master weight, next to weights stored in bf16."""
    remainders, masters = read.flag("optimizer.store_param_remainders"), read.flag("optimizer.master_weights", True)
    return _optimizer_class(read) == "FusedAdam" and remainders and masters and _stored(read) == "bf16"


def _lora(read: SettingsReader) -> int:
    """The rank of the adapters, 8 where a recipe has some without a rank; 0: the whole model is trained."""
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
    """Layers per stage: Automodel divides them evenly, into as many stages as `layers_per_stage` makes."""
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
    """The batch of a step and replica: a pipeline divides a local batch; without one it is a micro-batch."""
    local, whole = "step_scheduler.local_batch_size", "step_scheduler.global_batch_size"
    if pipeline == 1:
        size = read.size(local, 1)
        return Batch(size, batches_in(read.size(whole, size * data), size * data, read.path, name=whole), 1)
    size = read.size("distributed.pipeline.pp_microbatch_size", 1)
    number = batches_in(read.size(local, size), size, read.path, name=local)
    together = size * number * data
    return Batch(size, number, batches_in(read.size(whole, together), together, read.path, name=whole))


def _zero(read: SettingsReader, pipeline: int, expert: int) -> int:
    """FSDP keeps weights gathered over a pipeline, and, unless it is told otherwise, next to divided experts."""
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
    """The strategy by one name, whose case is all one to Automodel.  Source: components/distributed/config.py."""
    entry = "distributed.strategy"
    word = read.text(entry, "fsdp2").lower()
    if word not in _STRATEGY_NAMES:
        near = meant(word, _STRATEGY_NAMES)
        raise read.refusal(entry, f"is '{word}', which is none of {', '.join(_STRATEGY_NAMES)}{near}")
    return _STRATEGY_NAMES[word]


_STRATEGY_NAMES = {
    "fsdp2": "fsdp2", "megatron_fsdp": "megatron_fsdp", "megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp",
    "ddp": "ddp",
}  # fmt: skip
"""Automodel's words for strategies -> one for each."""


def _checkpointing(read: SettingsReader) -> str:
    """What is recomputed: none, full or selective.  Source: recipes/_dist_utils.py."""
    name = "distributed.activation_checkpointing"
    value = read.get(name, False)
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).lower()
    words = {"none": ("off", "disabled", "no"), "full": ("on", "full", "enabled", "yes"), "selective": ("selective",)}
    for what, said in words.items():
        if word in said:
            return what
    raise read.refusal(name, f"is {shown(value)}, which is none of true, false, full and selective")


def _model(read: SettingsReader) -> Model:
    entries = [f"model.{part}pretrained_model_name_or_path" for part in ("", "config.")]
    said = {entry: name for entry in entries if (name := read.text(entry, ""))}
    if not said:
        raise InputError(f"{read.path} names no model: give it with --model.")
    entry, name = next(iter(said.items()))
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
    """Tell whether tokens travel by DeepEP or HybridEP, as they do by default."""
    enabled = read.flag("model.backend.enable_deepep", True)
    return read.one_of("model.backend.dispatcher", "deepep", _DISPATCHERS) != "torch" and enabled


_DISPATCHERS = ("torch", "deepep", "hybridep", "uccl_ep", "mok")
"""Source: components/models/common/utils.py, BackendConfig."""


def _reduces_in_16_bits(read: SettingsReader) -> bool:
    """Tell whether gradients are summed in bf16."""
    return _dtype_of(read, "distributed.mp_policy.reduce_dtype", "fp32") == "bf16"


def _warnings(read: SettingsReader) -> Iterator[str]:
    """Sentences on words of Automodel's that are predicted as others."""
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
        read.set_aside("distributed.pipeline.")
    for part in ("compile", "fp8"):
        if read.settings.get(f"{part}.enabled", False) is False:
            read.set_aside(f"{part}.")
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
