"""Imports Megatron-LM's arguments from scripts, logs, and YAML of Megatron-Bridge and FlagScale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import accumulate
from pathlib import Path

from debubble.costs import framework_with
from debubble.costs.step import MOMENTS
from debubble.frameworks.deepspeed.import_ import SUMMED_IN
from debubble.frameworks.deepspeed.partition import divided_states
from debubble.frameworks.megatron import deepspeed_config, deepspeed_experts, yaml_config
from debubble.frameworks.megatron.arguments import Arguments
from debubble.frameworks.megatron.bridge import overlaps_gradients, read_bridge, read_recipe
from debubble.frameworks.megatron.changes import conflicts, notes, required, switches
from debubble.frameworks.megatron.deepspeed_config import config_warnings, is_on_host, zero_stage
from debubble.frameworks.megatron.deepspeed_experts import check_experts, with_experts_of_megatron
from debubble.frameworks.megatron.export import FSDP, environment
from debubble.frameworks.megatron.flagscale import is_flagscale, read_flagscale
from debubble.frameworks.megatron.mindspeed import SWAP_OPTIMIZER, as_megatron, is_mindspeed
from debubble.frameworks.megatron.model import model_of, uses_gpt2_vocabulary
from debubble.frameworks.megatron.orders import order_of
from debubble.frameworks.megatron.remarks import remarks_on, warnings_on
from debubble.frameworks.megatron.stages import stages_of
from debubble.frameworks.megatron.swift import (
    SWIFT,
    SWIFT_DEFAULTS,
    SWIFT_HARMLESS,
    SWIFT_OFF,
    check_required,
    read_swift,
)
from debubble.frameworks.megatron.target import MEGATRON_MODULES
from debubble.frameworks.megatron.yaml_config import is_yaml_config, read_yaml_config, with_yaml_config
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults
from debubble.imports.harmless import LAUNCHER_FLAGS
from debubble.imports.job import ImportedJob, nearest_multiples, replicas
from debubble.imports.reader import SettingsReader
from debubble.imports.registry import Importer, Settings, UserFacts, check_tool, imports
from debubble.imports.script_arguments import named_arguments
from debubble.imports.settings import DEEPSPEED_ENTRIES, MISSING_SOURCES, RECIPE, read_arguments, read_settings
from debubble.imports.training_scripts import COMMAND
from debubble.imports.unread import Unread, with_misspelt_first
from debubble.ir import InputError, RunOptions
from debubble.models import Model
from debubble.targets.offload import MODULES, ModuleOffload
from debubble.targets.target import sparse_layers


def read_job(path: Path, command_line: CommandLine | None = None) -> Settings:
    """The arguments of a file; YAML is Megatron-Bridge's, FlagScale's or --yaml-cfg's.  Raises InputError without any.

    Args:
        path: The file.
        command_line: The command line that starts it; None: unknown.
    """
    if path.suffix not in (".yaml", ".yml"):
        arguments = read_arguments(path, command_line)
        if RECIPE in arguments:
            return read_recipe(arguments[RECIPE], path)
        if COMMAND in arguments:
            return read_swift(arguments, path)
        return with_arguments(with_yaml_config(arguments, path), command_line)
    line = command_line or CommandLine({})
    settings = read_settings(path)
    check_tool(settings, path)
    if is_flagscale(settings):
        settings = {name: line.expand(value) for name, value in settings.items()}
        return with_arguments(read_flagscale(settings), command_line)
    if is_yaml_config(settings):
        expanded = {name: line.expand(value) for name, value in settings.items()}
        return with_arguments(read_yaml_config(expanded), command_line)
    return with_arguments(read_bridge(path, line), command_line)


def with_arguments(settings: Settings, command_line: CommandLine | None) -> Settings:
    """The arguments of a file, overridden by those of the command line."""
    return settings if command_line is None else {**settings, **named_arguments(command_line.words)}


def turned_off(job: Settings) -> Mapping[str, str]:
    """The values that turn off what ms-swift has on by default."""
    return SWIFT_OFF if job.get("framework") == SWIFT else {}


RECIPE_DEFAULTS = {"--bf16": True, "--use-distributed-optimizer": True}
DEFAULTS = {
    # arguments.py: fp32, no distributed optimizer, no sequence parallelism, nothing recomputed.
    "megatron": Defaults("Megatron-LM"),
    # The mixed_precision and ddp of the library's recipes, which such a file overrides.
    "megatron-bridge": Defaults("Megatron-Bridge's recipes", {**RECIPE_DEFAULTS, "peft.dim": 32}),
    # slime's arguments.py: set_default_megatron_args.
    "slime": Defaults("slime", RECIPE_DEFAULTS),
    SWIFT: SWIFT_DEFAULTS,
}
"""Framework that starts Megatron-LM -> its defaults."""
HARMLESS = """
    use_mcore_models transformer_impl deepspeed framework use_cpu_initialization distributed_init_method dataset.*
    logger.* tokenizer.* profiling.* scheduler.* rng.* dist.* rerun.* validation.* straggler.* checkpoint.*
    peft.alpha peft.dropout peft.dropout_position peft.lora_a_init_method peft.lora_b_init_method deepspeed_config
    ddp_impl actor_num_* rollout_* *_checkpoint ref_load advantage_estimator apply_chat_template balance_data
    lora_alpha lora_dropout lora_dropout_position lora_in_init_method lora_out_init_method lora_fusion
    swap_optimizer_times handler_name prompt_type is_instruction_dataset
    enable_hf2mg_convert model_type_hf no_shared_storage norm_topk_prob seq_aux
    colocate entropy_coef eps_clip* kl_* use_kl_loss prompt_data input_key label_key rm_type n_samples_per_*
    sglang_* eval_* address runtime_env_json use_tis num_rollout
"""
"""Entries that cost neither time nor memory of a step, besides those of all frameworks and of DeepSpeed."""


def megatron(read: SettingsReader, facts: UserFacts) -> ImportedJob:
    """The job of Megatron-LM's arguments: degrees, stages, order, recomputation, and the model if described."""
    framework = "slime" if any(name in read.settings for name in _SLIME_ARGUMENTS) else "megatron"
    defaults = DEFAULTS[str(read.get("framework", framework))]
    harmless = read.harmless + SWIFT_HARMLESS if defaults is SWIFT_DEFAULTS else read.harmless
    converts = "--*" if defaults is SWIFT_DEFAULTS else read.converts
    settings = with_experts_of_megatron(as_megatron(read.settings))
    arguments = Arguments(settings, read.path, defaults, harmless, converts)
    for name in ("framework", MISSING_SOURCES):
        arguments.get(name)
    if defaults is SWIFT_DEFAULTS:
        check_required(arguments, facts)
    is_fork = "--deepspeed" in arguments or "framework" in read.settings or is_mindspeed(read.settings)
    is_plain = framework == "megatron" and not is_fork
    check_experts(arguments)
    try:
        job = job_of(arguments, facts, target="megatron")
    except InputError as error:
        raise with_misspelt_first(error, arguments, known_flags() if is_plain else ()) from None
    if not is_plain:
        return replace(job, rest=job.rest.with_misspelt(LAUNCHER_FLAGS, ""))
    return replace(job, rest=job.rest.checked(known_flags() | LAUNCHER_FLAGS, "Megatron-LM or its launcher"))


imports.add(
    "megatron",
    Importer(
        name="megatron", read_job=megatron, settings=read_job, file="megatron-arguments.sh", conflicts=conflicts,
        environment=environment, with_arguments=read_job, defaults=DEFAULTS["megatron"],
        harmless=HARMLESS + deepspeed_experts.HARMLESS + deepspeed_config.HARMLESS + yaml_config.HARMLESS,
        turned_off=turned_off, required=required, notes=notes, switches=switches,
    ),
)  # fmt: skip


@cache
def known_flags() -> frozenset[str]:
    """The arguments that Megatron-LM has or had (tools/megatron_flags.py)."""
    text = resources.files("debubble.frameworks.megatron").joinpath("flags.txt").read_text()
    return frozenset(f"--{name}" for name in text.split())


_SLIME_ARGUMENTS = ("--actor-num-nodes", "--rollout-batch-size", "--rollout-num-gpus")
"""Arguments that identify slime, which sets some of Megatron-LM's arguments itself."""


def _micro_batches(arguments: Arguments, facts: UserFacts, data: int) -> tuple[int, int]:
    """The size and the number of a replica's micro-batches."""
    size = arguments.size("--micro-batch-size", 1)
    batch = _global_batch(arguments, size * data * (facts.micro_batches or 1))
    if batch % (size * data) and facts.micro_batches is None:
        raise InputError(
            f"{arguments.path}: a global batch of {batch} cannot be divided over {data} replicas of {size} sequences:"
            f" {nearest_multiples(batch, size * data)}, a --cluster with as many devices as the job has, or"
            " --micro-batches."
        )
    return size, facts.micro_batches or batch // (size * data)


def job_of(arguments: Arguments, facts: UserFacts, *, target: str) -> ImportedJob:
    """The job of Megatron-LM's arguments in a framework that accepts them."""
    pipeline = arguments.size("--pipeline-model-parallel-size", 1, instead=facts.pipeline)
    if arguments.flag("--no-pipeline-parallel") and facts.pipeline is None:
        pipeline = 1
    if arguments.size("--ds-sequence-parallel-size", 1) > 1:
        raise InputError(
            f"{arguments.path}: --ds-sequence-parallel-size is not predicted: to predict the job without,"
            " give --args '--ds-sequence-parallel-size 1'."
        )
    tensor = arguments.size("--tensor-model-parallel-size", 1)
    model = model_of(arguments, facts.model)
    if model.heads % tensor:
        raise InputError(
            f"{arguments.path}: --tensor-model-parallel-size is {tensor}, which does not divide the model's"
            f" {model.heads} attention heads."
        )
    context = arguments.size("--context-parallel-size", 1)
    data = replicas(facts.cluster, arguments.path, pipeline=pipeline, tensor=tensor, context=context)
    size, micro_batches = _micro_batches(arguments, facts, data)
    expert, expert_tensor = _expert_ranks(arguments, model, tensor=tensor, stage_ranks=tensor * context * data)
    layers, mtp_stage = stages_of(arguments, model, pipeline)
    zero = _zero(arguments)
    options = RunOptions(
        micro_batch_size=size,
        sequence_length=arguments.size("--seq-length", instead=facts.sequence_length),
        tensor=tensor,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        zero=zero if data * context > 1 else min(zero, 1),
        optimizer=_optimizer(arguments),
        dtype=_dtype(arguments),
        host_optimizer=_host_optimizer(arguments),
        expert_overlap=arguments.flag("--overlap-moe-expert-parallel-comm"),
        lora=_lora(arguments),
        gradient_dtype=_gradient_dtype(arguments),
        moment_dtype=_moment_dtype(arguments),
        sequence_parallel=tensor == 1 or arguments.flag("--sequence-parallel"),
        flash_attention=_keeps_no_scores(arguments),
        framework=_framework(arguments),
    )
    strategies = _strategies(arguments, model, layers)
    return ImportedJob(
        target=target,
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=micro_batches,
        layers=layers,
        order=order_of(arguments, pipeline=pipeline, chunks=len(layers) // pipeline, combined=options.expert_overlap),
        strategies=strategies,
        mtp_stage=mtp_stage,
        offload=_offload(arguments),
        defaulted=_defaulted(arguments, facts),
        warnings=(
            *warnings_on(arguments, options, facts.cluster.count),
            *config_warnings(arguments, options, micro_batches),
        ),
        rest=Unread.from_reader(arguments, remarks_on(arguments, options, model)),
    )


def _global_batch(arguments: Arguments, default: int) -> int:
    """Sequences per step; slime may set the number of steps per rollout instead."""
    steps = arguments.count("--num-steps-per-rollout")
    if "--global-batch-size" in arguments or steps == 0:
        return arguments.size("--global-batch-size", default)
    samples = arguments.size("--rollout-batch-size") * arguments.size("--n-samples-per-prompt", 1)
    return samples // steps


def _zero(arguments: Arguments) -> int:
    """The ZeRO level of Megatron's distributed optimizer, or of its FSDP, which shards everything by default."""
    if arguments.flag("--use-torch-fsdp2"):
        return 3
    if arguments.flag("--use-megatron-fsdp") or arguments.flag("--use-custom-fsdp"):
        strategy = arguments.word("--data-parallel-sharding-strategy", FSDP[3])
        return next((level for level, name in FSDP.items() if name == strategy), 3)
    stage = zero_stage(arguments, int(arguments.flag("--use-distributed-optimizer")))
    return divided_states(stage, _dtype(arguments)) if arguments.flag("--deepspeed") else stage


def _optimizer(arguments: Arguments) -> str:
    """The optimizer; raises InputError if the memory of its states is unknown."""
    name = (arguments.word("--optimizer", "adam") or "adam").removeprefix("dist_")
    if name == "sgd":
        return "momentum" if arguments.share("--sgd-momentum") else "sgd"
    small = arguments.word("--exp-avg-dtype", "fp32") == "fp8" and arguments.word("--exp-avg-sq-dtype") == "fp8"
    if name in _ADAMS:
        return "adamw-8bit" if small and arguments.flag("--use-precision-aware-optimizer") else "adamw"
    if name not in MOMENTS:
        raise arguments.refusal(
            "--optimizer", f"is {name}, whose states are not priced: to predict Adam's, give --args '--optimizer adam'"
        )
    return name


_ADAMS = ("adam", "fusedadam", "fusedadamw")
"""Names of Adam, including those of Habana's Megatron-DeepSpeed."""


def _host_optimizer(arguments: Arguments) -> float:
    """The fraction of optimizer states on the host: 1 for the switches of Megatron-DeepSpeed and MindSpeed."""
    on_host = arguments.flag("--cpu-optimizer") or is_on_host(arguments)
    if arguments.flag(SWAP_OPTIMIZER) or (on_host and arguments.flag("--deepspeed")):
        return 1.0
    return arguments.share("--optimizer-offload-fraction") if arguments.flag("--optimizer-cpu-offload") else 0.0


def _dtype(arguments: Arguments) -> str:
    """The compute dtype; a dtype in the file takes precedence over the framework's default."""
    names = [name for name in ("bf16", "fp16") if arguments.flag(f"--{name}")]
    specified = [name for name in names if arguments.settings.get(f"--{name}")]
    if len(specified) > 1:
        raise InputError(f"{arguments.path} has --bf16 and --fp16, of which Megatron-LM takes one: leave one out.")
    if arguments.flag("--fp8-hybrid") or arguments.flag("--fp8-e4m3") or any(name in arguments for name in _FP8):
        return "mxfp8" if arguments.word("--fp8-recipe") == "mxfp8" else "fp8"
    return "nvfp4" if any(name in arguments for name in _FP4) else next(iter(specified or names), "fp32")


_FP8 = ("--fp8-format", "--fp8", "--fp8-hybrid", "--fp8-e4m3")
_FP4 = ("--fp4-format", "--fp4")
_DTYPES = ("--bf16", "--fp16", *_FP8, *_FP4)


def _framework(arguments: Arguments) -> str:
    """The framework with the traits that the arguments change."""
    return framework_with(
        "megatron-lm",
        adapted="qkv" if set(arguments.words("peft.target_modules")) == {"linear_qkv"} else None,
        tensor_overlap=True if arguments.flag("--tp-comm-overlap") else None,
        gradient_overlap=True if overlaps_gradients(arguments) else None,
        gather_overlap=_gather_overlap(arguments),
        dispatches_once=True if _dispatches_once(arguments) else None,
        graphs=_graphs(arguments),
        keeps_remainders=True if _keeps_remainders(arguments) else None,
    )


def _gather_overlap(arguments: Arguments) -> bool | None:
    """False if gradients overlap with backwards, but the distributed optimizer's gather not with forwards; else None.

    Megatron-Bridge's recipes overlap it unless the file says otherwise.
    """
    name = "--overlap-param-gather"
    of_bridge = arguments.word("framework") == "megatron-bridge" and arguments.settings.get(name) is not False
    waits = arguments.flag("--overlap-grad-reduce") and not arguments.flag(name) and _zero(arguments) == 1
    return False if waits and not of_bridge else None


def _keeps_remainders(arguments: Arguments) -> bool:
    """Tell whether the optimizer stores only the 2 low bytes of master weights, precision-aware Adam's default.

    Source: Megatron-LM, optimizer_config.py, from Megatron Core 0.12 and Transformer Engine 2.1 on.
    """
    off = [arguments.flag(name) for name in ("--no-store-param-remainders", "--disable-store-param-remainders")]
    said = arguments.flag("--store-param-remainders", True) and not any(off)
    adam = arguments.word("--optimizer", "adam") == "adam" and arguments.word("--main-params-dtype", "fp32") == "fp32"
    halved = arguments.flag("--use-precision-aware-optimizer"), arguments.flag("--reuse-fp32-param")  # MindSpeed's
    used = any(halved) and not _host_optimizer(arguments)
    return used and said and adam and _dtype(arguments) == "bf16"


def _dispatches_once(arguments: Arguments) -> bool:
    """Tell whether tokens are dispatched by DeepEP or HybridEP."""
    of_primus = [arguments.flag(name) for name in ("--enable-primus-turbo", "--use-turbo-deepep")]
    dispatcher = arguments.word("--moe-token-dispatcher-type")
    return arguments.flag("--moe-enable-deepep") or all(of_primus) or dispatcher == "flex"


def _graphs(arguments: Arguments) -> str | None:
    """The scope of CUDA graphs: step or layers; None: Megatron's default."""
    kind = arguments.word("--cuda-graph-impl", "none")
    modules = {*arguments.words("--cuda-graph-scope"), *arguments.words("--cuda-graph-modules")}
    if kind == "full_iteration" or "full_iteration" in modules:
        return "step"
    return "layers" if kind != "none" or arguments.flag("--enable-cuda-graph") else None


def _gradient_dtype(arguments: Arguments) -> str:
    """The dtype in which gradients are summed: by default fp32 with bf16, and fp16 with fp16.

    Source: Megatron-LM, validate_args.
    """
    accumulates, dtype = arguments.flag("--accumulate-allreduce-grads-in-fp32"), _dtype(arguments)
    if arguments.flag("--deepspeed"):
        return deepspeed_config.gradient_dtype(arguments, dtype)
    of_fsdp = arguments.word(_FSDP_GRADIENTS) if arguments.flag("--use-megatron-fsdp") else None
    if of_fsdp is not None:
        of_parameters = dtype if dtype in ("fp16", "fp32") else "bf16"
        return of_parameters if of_fsdp == "auto" else of_fsdp
    if dtype == "fp16":
        return "fp32" if accumulates else "fp16"
    small = arguments.word("--main-grads-dtype", "fp32") != "fp32" and not accumulates
    return "bf16" if small or arguments.flag("--grad-reduce-in-bf16") else "fp32"


_FSDP_GRADIENTS = "--megatron-fsdp-main-grads-dtype"
_GRADIENT_DTYPES = (
    "--grad-reduce-in-bf16", "--main-grads-dtype", "--accumulate-allreduce-grads-in-fp32", _FSDP_GRADIENTS
)  # fmt: skip


def _moment_dtype(arguments: Arguments) -> str:
    """The dtype of both moments, which is fp32 unless the optimizer is precision-aware."""
    said = {arguments.word(name, "fp32") for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype")}
    return "bf16" if said <= {"bf16", "fp16"} and arguments.flag("--use-precision-aware-optimizer") else "fp32"


def _keeps_no_scores(arguments: Arguments) -> bool:
    """Tell whether attention is fused: Transformer Engine's is, that of older layers with --use-flash-attn."""
    if arguments.word("--attention-backend", "auto") in ("unfused", "local") or arguments.flag("--no-flash-attn"):
        return False
    fused = ("--use-flash-attn", "--use-flash-attn-v2", "--use-flash-attn-triton")
    return not _is_before_fusion(arguments) or any([arguments.flag(name) for name in fused])


def _is_before_fusion(arguments: Arguments) -> bool:
    """Tell by removed arguments whether the Megatron-LM is so old that its own attention stores scores."""
    return any(name in arguments for name in ("--deepspeed", "--checkpoint-activations", "--DDP-impl"))


def _lora(arguments: Arguments) -> int:
    """The rank of adapters, by Megatron-Bridge's name; 0: full fine-tuning."""
    has_adapters = any(name.startswith("peft") for name in arguments.settings)
    return arguments.size("peft.dim") if has_adapters else 0


def _defaulted(arguments: Arguments, user: UserFacts) -> dict[str, str]:
    """The facts that come from the framework's defaults -> the source of the default."""
    sharding = ("--use-distributed-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2", "--use-custom-fsdp")
    facts: dict[str, tuple[str, ...]] = {
        "dtype": _DTYPES,
        "gradients": (*_GRADIENT_DTYPES, f"{DEEPSPEED_ENTRIES}{SUMMED_IN}"),
        "sequence_parallel": ("--sequence-parallel",),
        "zero": (*sharding, "--zero-stage", f"{DEEPSPEED_ENTRIES}zero_optimization.stage"),
    }
    size_arguments = {"micro-batches of {}": "--micro-batch-size", "a global batch of {}": "--global-batch-size"}
    if user.sequence_length is None:
        size_arguments["sequences of {}"] = "--seq-length"
    if user.micro_batches is not None:
        del size_arguments["a global batch of {}"]
    if user.model is None and uses_gpt2_vocabulary(arguments):
        facts["GPT-2's vocabulary"] = ("--tokenizer-type",)
    values = arguments.defaults.values
    facts |= {words.format(values[name]): (name,) for words, name in size_arguments.items() if name in values}
    by_deepspeed = {"gradients": "DeepSpeed"} if arguments.flag("--deepspeed") else {}
    defaulted = arguments.defaulted(**facts)
    return {**defaulted, **{fact: source for fact, source in by_deepspeed.items() if fact in defaulted}}


def _offload(arguments: Arguments) -> ModuleOffload | None:
    """The offloaded modules of every layer that are predicted; None with full recomputation."""
    if (
        not arguments.flag("--fine-grained-activation-offloading")
        or arguments.word("--recompute-granularity") == "full"
    ):
        return None
    named = arguments.words("--offload-modules")
    modules = tuple(name for name in MODULES if name in named)
    return ModuleOffload(modules, arguments.share("--activation-offload-fraction")) if modules else None


def _strategies(arguments: Arguments, model: Model, layers: tuple[int, ...]) -> Mapping[int, tuple[str, str]]:
    """The recomputation strategies of the layers."""
    granularity = arguments.word("--recompute-granularity")
    if arguments.flag("--checkpoint-activations"):
        return {layer: ("full", "full") for layer in range(model.layers)}
    numbers = arguments.numbers("--recompute-layer-ids")
    if numbers:
        return dict.fromkeys(numbers, ("full", "full"))
    if arguments.flag("--recompute-activations"):
        granularity = "selective"
    method = arguments.word("--recompute-method")
    count = (arguments.count if method == "block" else arguments.size)("--recompute-num-layers", 1)
    former = arguments.word("--activations-checkpoint-method")
    if former is not None:
        granularity, method, count = "full", former, arguments.size("--activations-checkpoint-num-layers", 1)
    modules = frozenset(arguments.words("--recompute-modules") or ("core_attn",))
    if granularity == "full":
        max_layers = count if method == "block" else math.inf
        starts = (end - length for end, length in zip(accumulate(layers), layers, strict=True))
        return {
            start + index: ("full", "full")
            for start, length in zip(starts, layers, strict=True)
            for index in range(length)
            if index < max_layers
        }
    if granularity != "selective":
        return {}
    sparse = sparse_layers(model)
    known = {frozenset(name.split("+")): choice for name, choice in MEGATRON_MODULES.items()}
    priced = max((names for names in known if names <= modules), key=len, default=frozenset())
    if not priced:
        return {}
    setting = known[priced]
    halves = {layer: setting.sparse if layer in sparse else setting.dense for layer in range(model.layers)}
    return {layer: (choice.attention, choice.mlp) for layer, choice in halves.items()}


def _expert_ranks(arguments: Arguments, model: Model, *, tensor: int, stage_ranks: int) -> tuple[int, int | None]:
    """The expert-parallel degree, and the tensor-parallel degree of experts (None: the model's).

    Raises:
        InputError: if they do not divide the experts or the ranks of a stage.
    """
    name = "--expert-model-parallel-size"
    expert = arguments.size(name, 1)
    shards = arguments.size("--expert-tensor-parallel-size", tensor)
    subject = f"{arguments.path}: {name} is {expert}"
    if model.experts is None:
        if expert > 1:
            raise InputError(f"{subject}, and the model has no experts: leave it out, or give their number.")
        return expert, None
    if model.experts.count % expert:
        raise InputError(f"{subject}, which does not divide the model's {model.experts.count} experts.")
    if stage_ranks % (expert * shards):
        per_expert = f" with {shards} tensor-parallel ranks per expert" if shards > 1 else ""
        raise InputError(
            f"{subject}{per_expert}, which does not divide the {stage_ranks} ranks of a stage: choose a divisor of"
            f" {stage_ranks // shards}, or a --cluster of another size."
        )
    return expert, None if shards == tensor else shards
