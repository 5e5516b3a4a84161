"""Remarks on arguments of Megatron-LM that the prediction does not follow."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from debubble.frameworks.megatron.arguments import Arguments
from debubble.frameworks.megatron.deepspeed_config import has_config
from debubble.frameworks.megatron.mindspeed import SWAP_OPTIMIZER
from debubble.frameworks.megatron.model import LLAMA2, dropout, guesses_vocabulary, has_biases
from debubble.frameworks.megatron.orders import remarks_on_order
from debubble.frameworks.megatron.swift import SWIFT, SWIFT_OFF, remarks_on_swift
from debubble.frameworks.megatron.target import MEGATRON_MODULES
from debubble.imports.harmless import is_harmless
from debubble.imports.kinds import suggest
from debubble.imports.settings import DETACHED_ARGUMENTS, OPEN_LOOP, OVERWRITTEN_VARIABLES, RECIPE
from debubble.imports.shell.script_run import RANKS, SCRIPTS
from debubble.ir import RunOptions
from debubble.models import Model
from debubble.targets.offload import MODULES


def remarks_on(arguments: Arguments, options: RunOptions, model: Model) -> Iterator[str]:
    """Sentences on arguments that change the time or memory of a step and that the prediction does not follow."""
    assumed = {
        "--overlap-cpu-optimizer-d2h-h2d": arguments.flag("--optimizer-cpu-offload"),
        "--delay-wgrad-compute": options.expert_overlap,
    }
    for name, needed in assumed.items():
        if needed and not arguments.flag(name):
            yield f"{name} is off, and the prediction counts on it."
    uniform = arguments.word("--recompute-method") == "uniform" and arguments.size("--recompute-num-layers", 1) > 1
    if uniform or arguments.size("--checkpoint-num-layers", 1) > 1:
        yield "Uniform recomputation is taken for one input kept per layer, not one per group of layers."
    modules = set(arguments.words("--recompute-modules"))
    unknown = modules - {name for setting in MEGATRON_MODULES for name in setting.split("+")}
    if unknown:
        yield f"--recompute-modules {' '.join(sorted(unknown))} is not priced."
    if arguments.flag("--fine-grained-activation-offloading") and arguments.word("--recompute-granularity") == "full":
        yield "--fine-grained-activation-offloading with full recomputation is predicted to move nothing."
    unmoved = set(arguments.words("--offload-modules")) - {*MODULES}
    if unmoved:
        yield f"--offload-modules {' '.join(sorted(unmoved))} is not priced: activations are predicted to stay."
    if RECIPE in arguments:
        yield "What the launch leaves to its recipe is predicted by Megatron-Bridge's defaults, whatever it has."
    if options.expert > 1:
        yield from arguments.assume("--moe-token-dispatcher-type", "alltoall", "flex", default="allgather")
    yield from _remarks_on_model(arguments, model)
    if arguments.flag("--deepspeed") and "--zero-stage" not in arguments and not has_config(arguments):
        yield (
            "The ZeRO level stands in --deepspeed_config, which is neither in the script nor next to it: predicted is"
            " none; give it with --args '--zero-stage N'."
        )
    yield from arguments.assume("--fp8-recipe", "delayed", "tensorwise", "mxfp8")
    yield from arguments.assume("--fp4-recipe", "nvfp4")
    yield from arguments.assume("--main-params-dtype", "fp32")
    yield from arguments.assume("--megatron-fsdp-main-params-dtype", "fp32")
    yield from arguments.assume("--megatron-fsdp-grad-comm-dtype", "auto", options.gradient_dtype)
    if options.optimizer != "adamw-8bit" and options.moment_dtype == "fp32":
        for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
            yield from arguments.assume(name, "fp32")
    if arguments.flag("--qlora"):
        yield "--qlora: frozen weights are predicted unquantised; give --quantize nf4 for those of 4 bits."
    if options.lora:
        modules = set(arguments.words("peft.target_modules"))
        if modules and modules not in (_LORA_LAYERS, {"linear_qkv"}):
            yield f"Adapters are on {' '.join(sorted(modules))}, and the prediction counts on all linear layers."
    yield from remarks_on_order(arguments)
    if arguments.word("framework") == SWIFT:
        yield from remarks_on_swift(arguments, model)
    if arguments.word("--optimizer") == "dist_muon" and options.data > 1:
        yield "--optimizer dist_muon divides its states between replicas, and the prediction keeps them whole."
    yield from arguments.assume("--min-offloaded-tensor-size", "0")
    instances = arguments.size("--num-distributed-optimizer-instances", 1)
    if instances != 1:
        yield (
            f"--num-distributed-optimizer-instances {instances}: states are divided within each, and the prediction"
            " divides them among all replicas."
        )
    backend = arguments.word("--attention-backend", "auto")
    if backend in ("flash", "fused"):
        yield f"--attention-backend {backend} is predicted as any fused attention; a plan that is exported has auto."
    for name in _NO_EFFECT:
        arguments.get(name)
    for name in _NO_EFFECT_SWITCHES:
        arguments.flag(name)
    for name, sentence in _UNPREDICTED.items():
        if name in arguments:
            yield f"{name}: {sentence}"


def _remarks_on_model(arguments: Arguments, model: Model) -> Iterator[str]:
    """Sentences on features of the model that the prediction does not follow."""
    without = model.experts is not None and not (model.gated or model.experts.bias)
    if without and has_biases(arguments):
        yield "Biases of the experts are not in the prediction."
    if guesses_vocabulary(arguments):
        yield (
            f"--tokenizer-type {LLAMA2} is predicted with Llama 2's 32,000 words: give --args '--vocab-size N' if the"
            " tokenizer's file has others."
        )
    hidden = dropout(arguments, "--hidden-dropout")
    described = "--hidden-dropout" in arguments.settings or "--hidden-size" in arguments
    if hidden and not model.residual_dropout and described:
        said = "" if "--hidden-dropout" in arguments.settings else f" ({arguments.defaults.source}'s default)"
        yield f"--hidden-dropout {hidden:g}{said} is predicted as none: it keeps a byte per activation and half-layer."
    share = arguments.word("--rotary-percent", "1")
    if share not in ("1", "1.0"):
        yield f"--rotary-percent {share}: it costs nothing, and a model that is exported rotates whole heads."


def warnings_on(arguments: Arguments, options: RunOptions, devices: int) -> Iterator[str]:
    """Sentences on given values that the script does not run, and on steps that do more than train.

    Args:
        arguments: The script's arguments.
        options: The predicted job's options.
        devices: Number of devices of the cluster.
    """
    yield from _dynamic_batches(arguments, options)
    off = SWIFT_OFF if arguments.word("framework") == SWIFT else {}
    for name, values in _VALUES.items():
        # Not read through `arguments`, so that unpredicted arguments stay in the list of unread entries.
        said = arguments.settings.get(name)
        if name in arguments.settings and said is not False:
            arguments.check_has_value(name, said)
        word = " ".join(said) if isinstance(said, tuple) else said
        is_open = "$" in str(word) and is_harmless(name, word, "")
        if isinstance(word, str) and not is_open and word not in (*values.split(), off.get(name)):
            known = f"({values}){suggest(word, values.split())}"
            yield f"{name} {word} is no value that Megatron-LM has had {known}: the prediction may be of another."
    yield from _recomputation(arguments)
    for name, allowed in _LISTED.items():
        listed = arguments.words(name) if name in arguments.settings else ()
        for word in listed:
            if word not in allowed.split():
                near = suggest(word, allowed.split())
                yield f"{name} {word} is no value that Megatron-LM has had{near}: it is not priced."
    kind = (arguments.word("peft._target_") or "LoRA").rpartition(".")[2]
    if options.lora and kind != "LoRA":
        yield f"peft._target_ is {kind}, and the prediction counts on LoRA."
    stage = arguments.word("--stage", "sft") or ""
    if _MORE_THAN_TRAINING.search(stage):
        yield f"--stage {stage}: training alone is predicted, and the passes of other models next to it are not."
    # A log lists all arguments, also of features that the run does not use.
    in_script = arguments.path.suffix in SCRIPTS
    steps = [name for name in arguments.names if in_script and name.startswith("--grpo-") and name in arguments]
    if arguments.flag("--perform-rl-step"):
        steps.insert(0, "--perform-rl-step")
    if steps:
        yield f"{steps[0]}: training alone is predicted, and the rollouts and their log probabilities are not."
    for name in steps:
        arguments.get(name)
    distils = any([arguments.flag(name) for name in ("--kd", "--mos")])
    endings = "-teacher" if distils else ()
    of_teacher = [name for name in arguments.names if name.startswith(_TEACHER_PREFIXES) or name.endswith(endings)]
    if of_teacher:
        yield f"{of_teacher[0]}: the student alone is predicted, and the time and memory of its teacher are not."
    for name in of_teacher:
        arguments.get(name)
    for words in arguments.words(OVERWRITTEN_VARIABLES):
        yield f"--args has {words}: change it there."
    for name in arguments.words(DETACHED_ARGUMENTS):
        yield f"{name} begins a command of its own, as no backslash ends the line before: the training does not get it."
    for loop in arguments.words(OPEN_LOOP):
        yield f"The training is in a loop that the file does not decide ({loop}): predicted is one run of it."
    arguments.get("--world-size")
    for names in _WORLD_SIZES:
        # The value of the launcher's last argument is followed by the training script.
        said = {name: "".join(arguments.words(name)[:1]) for name in names if name in arguments.settings}
        if names[-1] not in said:
            continue
        for name, number in said.items():
            if not _RANKS.fullmatch(number):
                yield f"{name} {number} is no number that a launcher takes."
        ranks = math.prod(int(number) if number.isdecimal() else 0 for number in said.values())
        if ranks and ranks != devices:
            product = " x ".join(f"{name} {number}" for name, number in said.items())
            yield f"The job starts {ranks} ranks ({product}), and --cluster has {devices} devices, which are predicted."
        return


def _recomputation(arguments: Arguments) -> Iterator[str]:
    """Sentences on recomputation that Megatron-LM rejects.  Source: megatron/core/transformer/transformer_config.py."""
    granularity, method = arguments.word("--recompute-granularity"), arguments.word("--recompute-method")
    if granularity == "full" and method is None and not arguments.numbers("--recompute-layer-ids"):
        yield (
            "Megatron-LM does not start: --recompute-granularity full needs --recompute-method, uniform or block:"
            " predicted is that every layer recomputes."
        )
    if granularity == "selective" and method is not None and "--recompute-granularity" in arguments.settings:
        yield (
            f"Megatron-LM does not start: --recompute-method {method} is not for --recompute-granularity selective,"
            " which is predicted."
        )


def _dynamic_batches(arguments: Arguments, options: RunOptions) -> Iterator[str]:
    """A sentence on slime's micro-batches of a maximum number of tokens, if the predicted ones differ."""
    if not arguments.flag("--use-dynamic-batch-size"):
        return
    word = arguments.word("--max-tokens-per-gpu") or ""
    max_tokens = int(word) * options.context if word.isdecimal() else 0
    size, length = options.micro_batch_size, options.sequence_length
    if max_tokens != size * length:
        yield (
            f"--use-dynamic-batch-size fills micro-batches up to --max-tokens-per-gpu {word}, and predicted are those"
            f" of {size} x {length:,} tokens: give --sequence-length {max_tokens or 'N'} --args '--micro-batch-size 1',"
            " and with --micro-batches how many a replica then has in a step."
        )


_VALUES = {
    "--recompute-granularity": "full selective",
    "--recompute-method": "uniform block",
    "--attention-backend": "flash fused unfused local auto",
    "--fp8-format": "e4m3 hybrid",
    "--fp8-recipe": "delayed tensorwise mxfp8 blockwise custom",
    "--data-parallel-sharding-strategy": "no_shard optim optim_grads optim_grads_params",
    "--moe-token-dispatcher-type": "allgather alltoall alltoall_seq flex",
    "--moe-flex-dispatcher-backend": "deepep hybridep ncclep",
    "--cuda-graph-impl": "none local transformer_engine full_iteration",
    "--transformer-impl": "local transformer_engine inference_optimized",
    "--normalization": "LayerNorm RMSNorm layernorm rmsnorm",
    "--exp-avg-dtype": "fp32 fp16 bf16 fp8",
    "--exp-avg-sq-dtype": "fp32 fp16 bf16 fp8",
    "--main-grads-dtype": "fp32 bf16",
    "--main-params-dtype": "fp32 fp16",
    "--optimizer": "adam adamw fusedadam fusedadamw sgd muon dist_muon adaptive_muon lion soap",
    "--fp8": "e4m3 hybrid",
    "--fp4-format": "e2m1",
    "--fp4": "e2m1",
    "--fp4-recipe": "nvfp4 custom",
    "--activations-checkpoint-method": "uniform block",
    "--ckpt-format": "torch torch_dist zarr torch_dcp fsdp_dtensor",
    "--softmax-type": "vanilla off-by-one learnable",
    "--DDP-impl": "local torch FSDP",
    "--megatron-fsdp-main-grads-dtype": "fp32 bf16 fp16 auto",
    "--megatron-fsdp-main-params-dtype": "fp32 bf16 fp16 auto",
    "--megatron-fsdp-grad-comm-dtype": "fp32 fp16 bf16 auto",
    "--position-embedding-type": "learned_absolute rope rotary mrope yarn relative alibi none",
}
"""Values that Megatron-LM's parsers accept or accepted for arguments that affect the prediction."""
_LISTED = {
    "--recompute-modules": (
        "core_attn moe_act layernorm mla_up_proj mlp moe shared_experts gdn_norm_out gdp_in_proj gdp_qkv mhc"
    ),
    "--offload-modules": (
        "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act fused_group_mlp gdp_qkv"
    ),
    **dict.fromkeys(
        ("--cuda-graph-scope", "--cuda-graph-modules"),
        "full full_iteration full_iteration_inference attn mlp moe moe_router moe_preprocess mamba",
    ),
}
"""Arguments with several words -> allowed words, from megatron/core/transformer/transformer_config.py."""
_TEACHER_PREFIXES = ("--export-kd-teacher", "--kd-config", "--teacher")
"""Prefixes of distillation arguments in Megatron-LM and in Megatron-Bridge's models."""
_MORE_THAN_TRAINING = re.compile("dpo|ppo|grpo|simpo|^orm$|^prm$")
"""Values of MindSpeed-LLM's --stage that run further models or pairs of samples."""
_WORLD_SIZES = (
    ("--nnodes", "--nproc-per-node"), ("--num-nodes", "--num-gpus"), ("--nodes", "--ntasks-per-node"), ("--ntasks",),
    ("--actor-num-nodes", "--actor-num-gpus-per-node"), RANKS, ("--world-size",),
)  # fmt: skip
"""Arguments whose product is the world size, by launcher; the last of them is required."""

_RANKS = re.compile(r"[1-9]\d*|[1-9]\d*:[1-9]\d*|gpu|cpu|auto|xpu|mps|.*\$.*|")
"""A number or range of nodes, a number of ranks that torchrun determines, or an unknown value."""

_LORA_LAYERS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
"""The linear layers that are predicted to have adapters, by Megatron-Bridge's names."""

_NO_EFFECT = (
    "--ckpt-format", "--fp8-format", "--fp8", "--checkpoint-num-layers", "--main-grads-dtype", "--cuda-graph-impl",
    "--cuda-graph-scope", "--cuda-graph-modules", "--fp4-format", "--fp4", "--megatron-fsdp-main-grads-dtype",
)  # fmt: skip
"""Arguments without effect beyond those that were read."""
_NO_EFFECT_SWITCHES = (
    "--use-distributed-optimizer", "--use-precision-aware-optimizer", "--disable-bias-linear", "--add-bias-linear",
    "--use-flash-attn", "--use-flash-attn-v2", "--moe-grouped-gemm", "--sequence-parallel", "--deepspeed",
    "--accumulate-allreduce-grads-in-fp32", "--checkpoint-activations", "--deepspeed-activation-checkpointing",
    "--gradient-accumulation-fusion", "--no-gradient-accumulation-fusion", "--share-embeddings-and-output-weights",
    "--grad-reduce-in-bf16", "--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-param-gather",
    "--moe-enable-deepep", "--enable-cuda-graph",
)  # fmt: skip
"""Arguments without a value and without effect beyond those that were read."""

_UNPREDICTED = {
    "--apply-layernorm-1p": "it costs nothing, and a model that is exported has other norms.",
    SWAP_OPTIMIZER: "the states are predicted on the host, which steps them, as with --optimizer-cpu-offload.",
    "--delta-offload-bytes-across-pp-ranks": "all ranks are predicted to offload alike.",
    "--microbatch-group-size-per-virtual-pipeline-stage": "groups are predicted to be as long as the pipeline.",
}
"""Arguments that change a step and are not predicted -> sentence on the prediction."""
