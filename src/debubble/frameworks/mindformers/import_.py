"""Imports MindFormers' YAML configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from debubble.frameworks.mindformers.target import MINDFORMERS_CELLS
from debubble.imports.defaults import Defaults
from debubble.imports.job import ImportedJob, batches_in, check_ranks, replicas
from debubble.imports.kinds import BOOLEAN, INTEGER, NUMBER, ValueKind, as_yaml
from debubble.imports.model import ExpertSizes, LatentSizes, Sizes
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Importer, UserFacts, imports
from debubble.imports.settings import read_settings
from debubble.imports.unread import Unread
from debubble.ir import InputError, RunOptions
from debubble.models import Model

_MODEL = "model.model_config."
_FULL, _SELECTED = "recompute_config.recompute", "recompute_config.select_recompute"
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_BATCH = "training_args.global_batch_size"
_PARALLEL = "distribute_parallel_config."
_OLDER_NAMES = {
    f"{_PARALLEL}data_parallel_size": "parallel_config.data_parallel",
    f"{_PARALLEL}tensor_model_parallel_size": "parallel_config.model_parallel",
    f"{_PARALLEL}pipeline_model_parallel_size": "parallel_config.pipeline_stage",
    f"{_PARALLEL}context_parallel_size": "parallel_config.context_parallel",
    f"{_PARALLEL}expert_model_parallel_size": "parallel_config.expert_parallel",
    f"{_PARALLEL}sequence_parallel": "parallel_config.use_seq_parallel",
    f"{_PARALLEL}gradient_aggregation_group": "parallel_config.gradient_aggregation_group",
    f"{_PARALLEL}micro_batch_interleave_num": "micro_batch_interleave_num",
    f"{_PARALLEL}pipeline_parallel_config.pipeline_interleave": "parallel.pipeline_config.pipeline_interleave",
    f"{_PARALLEL}pipeline_parallel_config.pipeline_scheduler": "parallel.pipeline_config.pipeline_scheduler",
    f"{_PARALLEL}pipeline_parallel_config.virtual_pipeline_model_parallel_size": f"{_MODEL}pp_interleave_num",
    f"{_PARALLEL}pipeline_parallel_config.pipeline_stage_offset": f"{_MODEL}offset",
    f"{_PARALLEL}optimizer_parallel_config.enable_parallel_optimizer": "parallel.enable_parallel_optimizer",
    "training_args.micro_batch_size": "runner_config.batch_size",
    "training_args.gradient_accumulation_steps": "runner_config.gradient_accumulation_steps",
}
"""Entries of the layout with LLMTrainer -> the equivalent entries of the older layout.

Source: MindFormers 1.8, trainer/llm_trainer.py, and its guide to configurations.
"""
DEFAULTS = Defaults("MindFormers")
"""The optimizer states are not sharded unless enable_parallel_optimizer is set."""
HARMLESS = """
    runner_config.epochs runner_config.sink_mode runner_config.sink_size runner_wrapper.* output_dir load_checkpoint
    train_dataset.* train_dataset_task.* eval_dataset.* eval_dataset_task.* trainer.* processor.* callbacks
    callbacks.* eval_callbacks lr_schedule.* context.mode context.device_* context.ascend_config.* context.save_*
    training_args.*seed training_args.epochs training_args.*norm* training_args.*step* training_args.*skip*
    training_args.check_* training_args.calculate_* training_args.use_* training_args.resume_* training_args.scale_sense
    checkpoint_config.* tensorboard.* pretrained_model_dir use_legacy
    profile* auto_trans_ckpt auto_tune autotune_* filepath_prefix run_mode resume_training remote_save_url
    only_save_* src_strategy* transform_process_num do_eval eval_* metric.* monitor_config.* use_parallel
    model.arch.type model.model_config.type model.model_config.*_token_id model.model_config.checkpoint_name_or_path
    model.model_config.repetition_penalty model.model_config.max_decode_length model.model_config.top_k
    model.model_config.top_p model.model_config.do_sample model.model_config.temperature model.model_config.theta
    model.model_config.extend_method model.model_config.batch_size model.model_config.use_past optimizer.beta*
    layer_scale layer_decay lr_scale* max_device_memory context.max_device_memory context.max_call_depth
"""
"""Entries that cost neither time nor memory of a step, besides those of all frameworks."""


def mindformers(read: SettingsReader, facts: UserFacts) -> ImportedJob:
    """The job of a MindFormers configuration: degrees, stages, order, recomputation, and the model if described."""
    read.settings = {_OLDER_NAMES.get(name, name): value for name, value in read.settings.items()}
    model = facts.model or _model(read)
    number = _size(read, "num_layers", model.layers)
    if number != model.layers:
        raise InputError(
            f"{read.path} says num_layers {number}, but the model has {model.layers}: give the right one with --model."
        )
    pipeline = read.size("parallel_config.pipeline_stage", 1, instead=facts.pipeline)
    context = read.size("parallel_config.context_parallel", 1)
    tensor = read.size("parallel_config.model_parallel", 1)
    # In the newer layout the data-parallel degree defaults to the remaining devices.
    newer = _BATCH in read
    default_data = replicas(facts.cluster, read.path, pipeline=pipeline, tensor=tensor, context=context) if newer else 1
    data = read.size("parallel_config.data_parallel", default_data)
    expert = read.size("parallel_config.expert_parallel", 1)
    if model.experts is None and expert > 1:
        raise InputError(
            f"{read.path}: parallel_config.expert_parallel is {expert}, and the model has no experts: say them in"
            " moe_config, or give the model with --model."
        )
    chunks = read.size(f"{_MODEL}pp_interleave_num", 1)
    if not read.flag("parallel.pipeline_config.pipeline_interleave"):
        chunks = 1
    layers = _layers(read, model.layers, pipeline, chunks)
    shards_gradients = "parallel.parallel_optimizer_config.gradient_accumulation_shard"
    level = 2 if read.flag(shards_gradients) else 1
    zero = level if read.flag("parallel.enable_parallel_optimizer") else 0
    dataset_length = read.entry("train_dataset.data_loader.config.seq_length", INTEGER)
    length = _size(read, "seq_length", facts.sequence_length or dataset_length)
    degrees = {"pipeline_stage": pipeline, "data_parallel": data, "context_parallel": context, "model_parallel": tensor}
    check_ranks(facts.cluster, read.path, degrees)
    size = read.size("runner_config.batch_size", 1) * read.size("micro_batch_interleave_num", 1)
    options = RunOptions(
        micro_batch_size=size,
        sequence_length=length if facts.sequence_length is None else facts.sequence_length,
        tensor=tensor,
        data=data,
        context=context,
        expert=expert,
        zero=zero,
        dtype=read.choice(f"{_MODEL}compute_dtype", "bfloat16", _DTYPES),
        flash_attention=read.flag(f"{_MODEL}use_flash_attention", True),
        sequence_parallel=read.flag("parallel_config.use_seq_parallel") or tensor == 1,
    )
    return ImportedJob(
        target="mindformers",
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=_micro_batches(read, pipeline, size * data, instead=facts.micro_batches),
        layers=layers,
        order="interleaved-less-memory" if chunks > 1 else "1f1b",
        strategies=_strategies(read, layers, pipeline),
        defaulted=read.defaulted(
            dtype=(f"{_MODEL}compute_dtype",),
            gradients=(f"{_MODEL}param_init_type",),
            sequence_parallel=("parallel_config.use_seq_parallel",),
            zero=("parallel.enable_parallel_optimizer",),
        ),
        warnings=tuple(_warnings(read)),
        rest=Unread.from_reader(read, _remarks(read)),
    )


imports.add(
    "mindformers",
    Importer(
        name="mindformers", read_job=mindformers, settings=read_settings, file="plan.yaml", defaults=DEFAULTS,
        harmless=HARMLESS,
        marks="parallel_config.* runner_config.* recompute_config.* distribute_parallel_config.*",
    ),
)  # fmt: skip


_ALIASES = {
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_key_value_heads", "multi_query_group_num"),
    "vocab_size": ("padded_vocab_size",),
    "intermediate_size": ("ffn_hidden_size",),
    "seq_length": ("max_position_embeddings",),
}
"""Entries of a model -> their names in Hugging Face configs, which newer versions accept, and in GLM's."""
_UNSUPPORTED_ENTRIES = (
    "n_routed_experts", "num_local_experts", "moe_intermediate_size", "first_k_dense_replace", "layer_types",
    "sliding_window",
)  # fmt: skip
"""Entries of models with unsupported layers."""
_UNSUPPORTED_MOE_ENTRY = "moe_config.moe_layer_freq"


def _size(read: SettingsReader, name: str, default: int | None = None) -> int:
    """A size of the model, under any of its names."""
    names = [f"{_MODEL}{alias}" for alias in (name, *_ALIASES.get(name, ()))]
    return read.size(next((alias for alias in names if read.get(alias) is not None), names[0]), default)


def _micro_batches(read: SettingsReader, pipeline: int, batch: int, *, instead: int | None) -> int:
    """Micro-batches per step: micro_batch_num of a pipeline, or gradient accumulation steps without one.

    In the newer layout they follow from the global batch and the sequences per micro-batch of all replicas (`batch`).

    Source: MindFormers, trainer/base_trainer.py, _check_global_batch_size_for_auto_parallel.
    """
    name, unused = "parallel_config.micro_batch_num", "runner_config.gradient_accumulation_steps"
    if pipeline == 1:
        name, unused = unused, name
    if _BATCH in read and instead is None:
        for entry in (name, unused):
            read.number(entry, 1)
        return batches_in(read.size(_BATCH), batch, read.path, name=_BATCH)
    read.number(unused, 1)
    return read.size(name, 1, instead=instead)


def _model(read: SettingsReader) -> Model:
    if read.get(f"{_MODEL}hidden_size") is None:
        raise InputError(f"{read.path} does not describe its model: give it with --model.")
    names = [*(f"{_MODEL}{name}" for name in _UNSUPPORTED_ENTRIES), _UNSUPPORTED_MOE_ENTRY]
    unsupported = [name for name in names if read.get(name) not in (None, 0, False)]
    if read.get(f"{_MODEL}embedding_size") not in (None, read.get(f"{_MODEL}hidden_size")):
        unsupported.append(f"{_MODEL}embedding_size")
    if unsupported:
        raise InputError(
            f"{read.path}: {' '.join(unsupported)} describes layers that are not read here: give the model's"
            " config.json with --model."
        )
    hidden, heads = read.size(f"{_MODEL}hidden_size"), _size(read, "num_heads")
    width = _size(read, "intermediate_size", _ffn_width(read, hidden))
    return Sizes(
        layers=_size(read, "num_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(read, "n_kv_heads", heads),
        ffn=width,
        vocab=_size(read, "vocab_size"),
        head_dim=read.size(f"{_MODEL}head_dim", hidden // heads),
        tied=read.flag(f"{_MODEL}tie_word_embeddings"),
        qkv_bias=read.flag(f"{_MODEL}qkv_has_bias") or read.flag(f"{_MODEL}add_qkv_bias"),
        qk_norm=_norms_queries(read),
        experts=_experts(read, width) if read.size("moe_config.expert_num", 1) > 1 else None,
        latent=_latent(read) if read.count(f"{_MODEL}kv_lora_rank") else None,
        mtp_layers=read.count(f"{_MODEL}mtp_depth") or read.count(f"{_MODEL}num_nextn_predict_layers"),
    ).model()


def _latent(read: SettingsReader) -> LatentSizes:
    """DeepSeek's latent attention."""
    return LatentSizes(
        query_rank=read.count(f"{_MODEL}q_lora_rank") or None,
        rank=read.size(f"{_MODEL}kv_lora_rank"),
        content=read.size(f"{_MODEL}qk_nope_head_dim"),
        rotary=read.size(f"{_MODEL}qk_rope_head_dim"),
        value=read.size(f"{_MODEL}v_head_dim"),
    )


def _experts(read: SettingsReader, width: int) -> ExpertSizes:
    ffn = read.size("moe_config.moe_intermediate_size", width)
    return ExpertSizes(
        count=read.size("moe_config.expert_num"),
        per_token=read.size("moe_config.num_experts_chosen", 1),
        ffn=ffn,
        dense=tuple(range(read.count("moe_config.first_k_dense_replace"))),
        shared=ffn * read.count("moe_config.shared_expert_num"),
    )


def _norms_queries(read: SettingsReader) -> bool:
    """Tell whether queries and keys are normalized, as in Qwen3."""
    name = f"{_MODEL}architectures"
    families = read.texts(name) if isinstance(read.get(name), list) else [read.text(name, "")]
    named = [*families, *(read.text(f"{_MODEL}{name}", "") for name in ("model_type", "type"))]
    return read.flag(f"{_MODEL}use_qk_norm") or any("qwen3" in name.lower() for name in named)


def _ffn_width(read: SettingsReader, hidden: int) -> int:
    """The inner width of MindFormers' Llama from ffn_dim_multiplier and multiple_of, if intermediate_size is unset."""
    width: float = 4 * hidden
    factor = read.entry(f"{_MODEL}ffn_dim_multiplier", NUMBER)
    if factor is not None and factor <= 0:
        raise read.refusal(f"{_MODEL}ffn_dim_multiplier", f"is {factor:g}, and must be above 0")
    if factor is not None:
        width = int((factor + 0.01) * width)
    multiple = read.size(f"{_MODEL}multiple_of", 256)
    return multiple * -(-int(2 * width / 3) // multiple)


def _layers(read: SettingsReader, layers: int, pipeline: int, chunks: int) -> tuple[int, ...]:
    """Layers per stage: an even share plus `offset`; raises InputError if they do not sum to all layers."""
    name = f"{_MODEL}offset"
    offset = read.get(name, 0)
    stages = pipeline * chunks
    if stages > layers:
        raise InputError(f"{layers} layers cannot fill {stages} stages.")
    try:
        rows = _rows([offset] * pipeline if type(offset) is int else offset, pipeline, chunks, switches=False)
    except ValueError as error:
        raise read.refusal(name, str(error)) from None
    more = [extra for row in (rows if len(rows) == chunks else rows * chunks) for extra in row]
    counts = tuple(layers // stages + number for number in more)
    if sum(counts) != layers:
        raise read.refusal(name, f"is {as_yaml(offset)}, which makes {sum(counts)} layers of {layers}")
    if min(counts) < 0:
        raise read.refusal(name, f"is {as_yaml(offset)}, which leaves a stage less than no layers")
    return counts


def _rows(value: object, pipeline: int, chunks: int, *, switches: bool) -> list[list[int]]:
    """One number per device, in one list for all chunks or in one list per chunk; raises ValueError otherwise.

    Args:
        value: The numbers.
        pipeline: Pipeline devices.
        chunks: Stages per device.
        switches: Whether a number may be true, for all layers, and must not be negative.
    """
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    numbers = [number for row in rows if isinstance(row, list) and len(row) == pipeline for number in row]
    plain = all(type(number) is int or (switches and isinstance(number, bool)) for number in numbers)
    if len(numbers) not in (pipeline, pipeline * chunks) or not plain or (switches and min(numbers) < 0):
        raise ValueError(
            f"is {as_yaml(value)}, which is neither {'true or false' if switches else 'a whole number'} nor a number"
            f" for each of the {pipeline} devices, in one list or in one for each chunk"
        )
    return [numbers[start : start + pipeline] for start in range(0, len(numbers), pipeline)]


def _chunk_counts(read: SettingsReader, name: str, value: object, layers: Sequence[int], pipeline: int) -> list[int]:
    """Number of leading layers per chunk that a switch or numbers select; one list for all chunks is per device.

    Source: MindFormers, models/utils.py, LayerSetting, _alloc_recompute_layer.
    """
    chunks = len(layers) // pipeline
    numbers = [value or 0] * pipeline if value is None or isinstance(value, bool) else value
    try:
        rows = _rows(numbers, pipeline, chunks, switches=True)
    except ValueError as error:
        raise read.refusal(name, str(error)) from None
    if len(rows) == chunks:
        counts = [number for row in rows for number in row]
        return [length if number is True else number for number, length in zip(counts, layers, strict=True)]
    per_device = [_round_robin(number, layers[device::pipeline]) for device, number in enumerate(rows[0])]
    return [chunk_counts[chunk] for chunk in range(chunks) for chunk_counts in per_device]


def _round_robin(number: int, lengths: Sequence[int]) -> list[int]:
    """Layers per chunk for a number of layers of a device (True: all), taken from its chunks in turn."""
    turns = sorted((position, chunk) for chunk, length in enumerate(lengths) for position in range(length))
    chunks = [chunk for _, chunk in (turns if number is True else turns[:number])]
    return [chunks.count(chunk) for chunk in range(len(lengths))]


def _strategies(read: SettingsReader, layers: Sequence[int], pipeline: int) -> Mapping[int, tuple[str, str]]:
    """Recomputation strategies per layer: leading layers of every chunk in full, then operators by pattern."""
    full_layers = _chunk_counts(read, _FULL, read.get(_FULL, False), layers, pipeline)
    patterns = {
        operator: _chunk_counts(read, name, value, layers, pipeline)
        for operator, cells in MINDFORMERS_CELLS.items()
        for cell in cells
        for name, value in [_selected(read, operator, cell)]
        if value not in (None, False, [])
    }
    begins = [end - length for end, length in zip(accumulate(layers), layers, strict=True)]
    chosen: dict[int, tuple[str, str]] = {}
    for stage, (begin, length) in enumerate(zip(begins, layers, strict=True)):
        for position in range(length):
            named = [operator for operator, counts in patterns.items() if position < counts[stage]]
            halves = ("full", "full") if position < full_layers[stage] else (_half(named, 0), _half(named, 1))
            if halves != ("none", "none"):
                chosen[begin + position] = halves
    return chosen


def _selected(read: SettingsReader, operator: str, cell: str) -> tuple[str, object]:
    """The entry for a cell, and the layers in which it is recomputed: a switch, or numbers.

    If the entry names no cells, it applies to MindFormers' two default cells.

    Source: MindFormers, models/utils.py, LayerSetting.
    """
    all_cells = read.get(_SELECTED)
    if isinstance(all_cells, list) and all(isinstance(name, str) for name in all_cells):
        return _SELECTED, cell in all_cells
    name = f"{_SELECTED}.{cell}"
    if (cell_value := read.get(name)) is not None:
        return name, cell_value
    return _SELECTED, all_cells if operator in _DEFAULT_OPERATORS else None


_DEFAULT_OPERATORS = ("1:activation", "1:multiply")
"""The operators of the cells that MindFormers recomputes if none is named."""


def _half(named: Sequence[str], half: int) -> str:
    return "+".join(operator[2:] for operator in named if operator[0] == str(half)) or "none"


def _warnings(read: SettingsReader) -> Iterator[str]:
    """Sentences on settings that are predicted as other values."""
    yield from read.assume("optimizer.type", "AdamW")
    yield from read.assume("parallel.pipeline_config.pipeline_scheduler", "1f1b")


def _remarks(read: SettingsReader) -> Iterator[str]:
    read.choice(f"{_MODEL}param_init_type", "float32", _DTYPES)
    yield from read.assume(f"{_MODEL}param_init_type", "float32")
    kinds: Mapping[str, ValueKind[Any]] = {
        "capacity_factor": NUMBER,
        "comp_comm_parallel": BOOLEAN,
        "enable_cold_hot_expert": BOOLEAN,
    }
    for name, kind in ((f"moe_config.{entry}", kind) for entry, kind in kinds.items()):
        if read.entry(name, kind) is not None:
            yield f"{name} is {read.get(name)}, and experts are predicted to drop no token and to wait for messages."
