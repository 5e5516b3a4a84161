"""Megatron-LM: its command-line arguments, in a script, as it logs them, or as Megatron-Bridge has them in YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from debubble.exports.megatron import FSDP
from debubble.imports.job import ImportedJob, even_layers, replicas
from debubble.imports.megatron_bridge import read_bridge
from debubble.imports.model import Sizes, hub_model
from debubble.imports.registry import Settings, UserFacts, importer
from debubble.imports.settings import SettingsReader, read_arguments, unread
from debubble.ir import InputError, RunOptions
from debubble.models import Model
from debubble.targets.frameworks import MEGATRON_MODULES
from debubble.targets.offload import MODULES, ModuleOffload
from debubble.targets.orders import COMBINED
from debubble.targets.target import sparse_layers


def read_job(path: Path) -> Settings:
    """The arguments of a file; YAML is Megatron-Bridge's.  Raises InputError if it has none."""
    return read_bridge(path) if path.suffix in (".yaml", ".yml") else read_arguments(path)


_LAYOUT = "--pipeline-model-parallel-layout"
_SPLITS = (
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Other ways to divide layers, which Megatron-LM refuses beside a layout."""


def conflicts(job: Settings, changed: Settings) -> Iterator[str]:
    """The job's arguments that Megatron-LM refuses beside the changed ones, or that overrule them."""
    if changed.get(_LAYOUT) is not None:
        yield from (name for name in _SPLITS if name in job)
    if "--recompute-granularity" in changed and "--recompute-activations" in job:
        yield "--recompute-activations"


@importer("megatron", settings=read_job, file="megatron-arguments.sh", conflicts=conflicts)
def megatron(read: SettingsReader, given: UserFacts) -> ImportedJob:
    """Degrees, stages, order and recomputation of Megatron-LM's arguments, and the model if they describe it."""
    return job_of(Arguments(read.settings, read.path), given, target="megatron")


def job_of(arguments: Arguments, given: UserFacts, *, target: str) -> ImportedJob:
    """The job of Megatron-LM's arguments in a framework that takes them."""
    pipeline = arguments.size("--pipeline-model-parallel-size", 1, instead=given.pipeline)
    tensor = arguments.size("--tensor-model-parallel-size", 1)
    context = arguments.size("--context-parallel-size", 1)
    data = replicas(given.cluster, arguments.path, pipeline=pipeline, tensor=tensor, context=context)
    size = arguments.size("--micro-batch-size", 1)
    batch = arguments.number("--global-batch-size", size * data * (given.micro_batches or 1))
    micro_batches = given.micro_batches or batch // (size * data)
    if micro_batches * size * data != batch and given.micro_batches is None:
        raise InputError(
            f"{arguments.path}: a global batch of {batch} cannot be divided over {data} replicas of {size} sequences."
        )
    named = given.model or hub_model(arguments.word("model") or "")
    model = _model(arguments) if named is None else _named_model(named, arguments)
    layers, mtp_stage = _stages(arguments, model.layers, pipeline)
    options = RunOptions(
        micro_batch_size=size,
        sequence_length=arguments.size("--seq-length", instead=given.sequence_length),
        tensor=tensor,
        data=data,
        context=context,
        expert=arguments.size("--expert-model-parallel-size", 1),
        expert_tensor=_expert_tensor(arguments, tensor),
        zero=_zero(arguments) if data * context > 1 else int("--use-distributed-optimizer" in arguments),
        optimizer=_optimizer(arguments),
        dtype=_dtype(arguments),
        host_optimizer=_host_optimizer(arguments),
        expert_overlap="--overlap-moe-expert-parallel-comm" in arguments,
    )
    strategies = _strategies(arguments, model, layers)
    return ImportedJob(
        target=target,
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=micro_batches,
        layers=layers,
        order=_order(arguments, chunks=len(layers) // pipeline, combined=options.expert_overlap),
        strategies=strategies,
        mtp_stage=mtp_stage,
        offload=_offload(arguments),
        unread=tuple(_unread(arguments, options)),
    )


class Arguments(SettingsReader):
    """Arguments, whose values are words: the numbers among them, and which of them were asked for."""

    def word(self, name: str, default: str | None = None) -> str | None:
        """The value of an argument that has one."""
        value = self.get(name, default)
        return value if value is None else str(value)

    def words(self, name: str) -> tuple[str, ...]:
        """The words behind an argument."""
        value = self.get(name, ())
        return (value,) if isinstance(value, str) else () if value is True else tuple(value)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; raises InputError if it is missing without a default, or is none."""
        word = self.word(name)
        if word is None:
            if default is None:
                raise InputError(f"{self.path} does not say {name}; give what it describes on the command line.")
            return default
        return self._whole(name, word)

    def numbers(self, name: str) -> list[int]:
        """The whole numbers behind an argument; raises InputError if one is none."""
        return [self._whole(name, word) for word in self.words(name)]

    def _whole(self, name: str, word: str) -> int:
        try:
            return int(word)
        except ValueError:
            raise InputError(f"{self.path}: {name} is '{word}', which is no whole number that is known here.") from None

    def share(self, name: str) -> float:
        """A number between 0 and 1, which is 1 if the argument is not there; raises InputError if it is none."""
        word = self.word(name, "1")
        try:
            share = float(word or "")
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise InputError(f"{self.path}: {name} is '{word}', which is no share between 0 and 1.")
        return share


def _model(arguments: Arguments) -> Model:
    hidden, heads = arguments.size("--hidden-size"), arguments.size("--num-attention-heads")
    gated = "--swiglu" in arguments
    # Megatron-LM's own defaults, from its arguments.py.
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    grouped = "--group-query-attention" in arguments
    positions = arguments.word("--position-embedding-type", "learned_absolute")
    vocab = arguments.number("--padded-vocab-size", 0) or arguments.number("--vocab-size", 0) or _vocabulary(arguments)
    if "--multi-latent-attention" in arguments or "--moe-layer-freq" in arguments:
        raise InputError(
            "Multi-latent attention and patterns of expert layers are not read: give the model with --model."
        )
    return Sizes(
        layers=arguments.size("--num-layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=arguments.number("--num-query-groups", heads) if grouped else heads,
        head_dim=arguments.number("--kv-channels", hidden // heads),
        ffn=arguments.number("--ffn-hidden-size", ffn),
        vocab=vocab,
        gated=gated,
        rms_norm=arguments.word("--normalization", "LayerNorm") == "RMSNorm",
        rotary=positions == "rope" or "--use-rotary-position-embeddings" in arguments,
        tied="--untie-embeddings-and-output-weights" not in arguments,
        qkv_bias="--add-qkv-bias" in arguments,
        qk_norm="--qk-layernorm" in arguments,
        positions=arguments.number("--max-position-embeddings", 4096),
        experts=arguments.number("--num-experts", 0),
        experts_per_token=arguments.number("--moe-router-topk", 2),
        expert_ffn=arguments.number("--moe-ffn-hidden-size", 0) or None,
    ).model()


def _named_model(model: Model, arguments: Arguments) -> Model:
    """The model that was named; raises InputError if the arguments describe one of another size."""
    for name, size in (
        ("--num-layers", model.layers), ("--hidden-size", model.hidden), ("--num-attention-heads", model.heads)
    ):  # fmt: skip
        if arguments.number(name, size) != size:
            raise InputError(
                f"{arguments.path} says {name} {arguments.word(name)}, but the model has {size}: give the right one"
                " with --model."
            )
    for name in _OF_THE_MODEL:
        arguments.get(name)
    return model


_OF_THE_MODEL = (
    "--ffn-hidden-size", "--swiglu", "--vocab-size", "--padded-vocab-size", "--group-query-attention",
    "--num-query-groups", "--kv-channels", "--normalization", "--position-embedding-type", "--max-position-embeddings",
    "--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights", "--add-qkv-bias", "--qk-layernorm",
    "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size",
)  # fmt: skip
"""Arguments that a model's config says too."""


def _vocabulary(arguments: Arguments) -> int:
    """The size of a tokenizer's vocabulary, as Megatron-LM pads it; raises InputError if it is not known."""
    kind, name = arguments.word("--tokenizer-type") or "", arguments.word("--tokenizer-model") or ""
    of_model = hub_model(name) if kind == "HuggingFaceTokenizer" else None
    words = of_model.vocab if of_model is not None else _TOKENIZERS.get(kind)
    if words is None:
        raise InputError(
            "The arguments do not say --vocab-size, which Megatron-LM takes from the tokenizer: give the model with"
            " --model, or a log with the padded_vocab_size that it prints."
        )
    multiple = arguments.size("--make-vocab-size-divisible-by", 128) * arguments.size("--tensor-model-parallel-size", 1)
    return -(-words // multiple) * multiple


_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
"""Tokenizers of one vocabulary each."""


def _stages(arguments: Arguments, layers: int, pipeline: int) -> tuple[tuple[int, ...], int | None]:
    """Layers per stage, and the stage of the multi-token-prediction layers."""
    layout = arguments.word(_LAYOUT)
    if layout is not None:
        stages = _layout(layout)
        mtp = next((s for s, stage in enumerate(stages) if "m" in stage), None)
        return tuple(stage.count("t") for stage in stages), mtp
    per_virtual = arguments.number("--num-layers-per-virtual-pipeline-stage", 0)
    chunks = arguments.number("--num-virtual-stages-per-pipeline-rank", 0)
    chunks = max(layers // pipeline // per_virtual if per_virtual else chunks, 1)
    first, last = (arguments.numbers(f"--decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if not first and not last:
        return _even_stages(arguments, layers, pipeline * chunks), None
    between = pipeline - len(first) - len(last)
    if between < 0:
        raise InputError(f"{arguments.path} says the layers of the first and the last of {pipeline} pipeline devices.")
    middle = even_layers(layers - sum(first) - sum(last), between) if between else ()
    parts = [even_layers(count, chunks) for count in (*first, *middle, *last)]
    return tuple(part[chunk] for chunk in range(chunks) for part in parts), None


def _even_stages(arguments: Arguments, layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, where embedding and loss count as one each if the arguments say so."""
    embedding = int("--account-for-embedding-in-pipeline-split" in arguments)
    loss = int("--account-for-loss-in-pipeline-split" in arguments)
    counts = list(even_layers(layers + embedding + loss, stages))
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def _layout(text: str) -> list[str]:
    """The stages of a layout string such as `Et*3|(tt|)*29,m|L`, one letter per layer; InputError if it is none."""
    flat = text.replace(",", "").replace(" ", "")
    while (group := re.search(r"\(([^()]*)\)(?:\*(\d+))?", flat)) is not None:
        flat = flat[: group.start()] + group[1] * int(group[2] or 1) + flat[group.end() :]
    flat = re.sub(r"([EtmL])\*(\d+)", lambda match: match[1] * int(match[2]), flat)
    if re.fullmatch(r"[EtmL|]+", flat) is None:
        raise InputError(f"{_LAYOUT} is '{text}', which is no layout of E, t, m, L and |.")
    return flat.split("|")


def _zero(arguments: Arguments) -> int:
    """The ZeRO level of Megatron's distributed optimizer, or of its FSDP, which divides everything by default."""
    if "--use-torch-fsdp2" in arguments:
        return 3
    if "--use-megatron-fsdp" in arguments:
        strategy = arguments.word("--data-parallel-sharding-strategy", FSDP[3])
        return next((level for level, name in FSDP.items() if name == strategy), 3)
    return int("--use-distributed-optimizer" in arguments)


def _optimizer(arguments: Arguments) -> str:
    name = arguments.word("--optimizer", "adam") or "adam"
    if name == "sgd":
        return "momentum" if arguments.share("--sgd-momentum") else "sgd"
    small = arguments.word("--exp-avg-dtype", "fp32") == "fp8" and arguments.word("--exp-avg-sq-dtype") == "fp8"
    if name == "adam":
        return "adamw-8bit" if small and "--use-precision-aware-optimizer" in arguments else "adamw"
    return name


def _host_optimizer(arguments: Arguments) -> float:
    return arguments.share("--optimizer-offload-fraction") if "--optimizer-cpu-offload" in arguments else 0.0


def _dtype(arguments: Arguments) -> str:
    names = [name for name in ("bf16", "fp16") if f"--{name}" in arguments]
    return "fp8" if arguments.word("--fp8-format") is not None else next(iter(names), "fp32")


def _offload(arguments: Arguments) -> ModuleOffload | None:
    """The modules of every layer that are offloaded and priced; layers that recompute wholly have none."""
    if "--fine-grained-activation-offloading" not in arguments or arguments.word("--recompute-granularity") == "full":
        return None
    named = arguments.words("--offload-modules")
    modules = tuple(name for name in MODULES if name in named)
    return ModuleOffload(modules, arguments.share("--activation-offload-fraction")) if modules else None


def _order(arguments: Arguments, *, chunks: int, combined: bool) -> str:
    """Megatron's own order, or that of Primus's pipeline."""
    if combined and chunks > 1:
        return COMBINED
    named = {"zero-bubble": "zb-h1", "1f1b": "1f1b", "1f1b-interleaved": "interleaved" if chunks > 1 else "1f1b"}
    algorithm = arguments.word("--pp-algorithm") if "--patch-primus-pipeline" in arguments else None
    if algorithm is None:
        return "interleaved" if chunks > 1 else "1f1b"
    if algorithm not in named:
        raise InputError(f"The order '{algorithm}' of Primus is not known here; there are: {', '.join(named)}.")
    return named[algorithm]


def _strategies(arguments: Arguments, model: Model, layers: tuple[int, ...]) -> Mapping[int, tuple[str, str]]:
    """The operators that every layer recomputes."""
    granularity = arguments.word("--recompute-granularity")
    numbers = arguments.numbers("--recompute-layer-ids")
    if numbers:
        return dict.fromkeys(numbers, ("full", "full"))
    if "--recompute-activations" in arguments:
        granularity = "selective"
    method, count = arguments.word("--recompute-method"), arguments.number("--recompute-num-layers", 1)
    modules = frozenset(arguments.words("--recompute-modules") or ("core_attn",))
    if granularity == "full":
        most = count if method == "block" else math.inf
        begins = (end - length for end, length in zip(accumulate(layers), layers, strict=True))
        return {
            begin + place: ("full", "full")
            for begin, length in zip(begins, layers, strict=True)
            for place in range(length)
            if place < most
        }
    if granularity != "selective":
        return {}
    sparse = sparse_layers(model)
    known = {frozenset(name.split("+")): choice for name, choice in MEGATRON_MODULES.items()}
    priced = max((names for names in known if names <= modules), key=len, default=frozenset())
    if not priced:
        return {}
    ways = {layer: known[priced].sparse if layer in sparse else known[priced].dense for layer in range(model.layers)}
    return {layer: (way.attention, way.mlp) for layer, way in ways.items()}


def _expert_tensor(arguments: Arguments, tensor: int) -> int | None:
    """Ranks that divide each expert; None: the tensor-parallel ones."""
    shards = arguments.number("--expert-tensor-parallel-size", tensor)
    return None if shards == tensor else shards


def _unread(arguments: Arguments, options: RunOptions) -> Iterator[str]:
    """Sentences on what changes time or memory and is not in the prediction."""
    counted_on = {
        "--sequence-parallel": options.tensor > 1,
        "--overlap-cpu-optimizer-d2h-h2d": options.host_optimizer > 0,
        "--delay-wgrad-compute": options.expert_overlap,
    }
    for name, needed in counted_on.items():
        if name not in arguments and needed:
            yield f"{name} is off, and the prediction counts on it."
    if arguments.word("--recompute-method") == "uniform" and arguments.number("--recompute-num-layers", 1) > 1:
        yield "--recompute-method uniform is taken for one input kept per layer, not one per group of layers."
    modules = set(arguments.words("--recompute-modules"))
    unknown = modules - {name for setting in MEGATRON_MODULES for name in setting.split("+")}
    if unknown:
        yield f"--recompute-modules {' '.join(sorted(unknown))} is not priced."
    if "--fine-grained-activation-offloading" in arguments and arguments.word("--recompute-granularity") == "full":
        yield "--fine-grained-activation-offloading beside full recomputation is predicted to move nothing."
    unmoved = set(arguments.words("--offload-modules")) - {*MODULES}
    if unmoved:
        yield f"--offload-modules {' '.join(sorted(unmoved))} is not priced: activations are predicted to stay."
    if options.expert > 1:
        yield from arguments.assume("--moe-token-dispatcher-type", "alltoall", "flex", default="allgather")
    yield from arguments.assume("--attention-backend", "flash", "fused", "auto")
    yield from arguments.assume("--min-offloaded-tensor-size", "0")
    for name in _COUNTED:
        arguments.get(name)
    for name, sentence in _UNPRICED.items():
        if name in arguments:
            yield f"{name}: {sentence}"
    yield from unread(arguments.left, _MAY_COST)


_COUNTED = ("--ckpt-format", "--use-distributed-optimizer", "--use-precision-aware-optimizer")
"""Arguments that change nothing beside those that were read."""

_UNPRICED = {
    "--delta-offload-bytes-across-pp-ranks": "all ranks are predicted to offload alike.",
    "--microbatch-group-size-per-virtual-pipeline-stage": "groups are predicted to be as long as the pipeline.",
    "--tp-comm-overlap": "tensor-parallel messages are predicted to be waited for.",
    "--overlap-grad-reduce": "gradients are predicted to be summed after the pipeline.",
    "--moe-shared-expert-intermediate-size": "the shared expert is not in the model; give it with --model.",
}
"""Arguments that change a step and are not predicted."""

_MAY_COST = re.compile(
    "recompute|offload|parallel|pipeline|overlap|expert|moe-(layer|shared|router-topk)|fsdp|shard|graph|mamba|hybrid"
    "|window|encoder|vision|lora|heterogeneous|mtp|multi-latent|linear-attention"
)
"""Words in the names of arguments that change time or memory of a step."""
