"""Reads the model that Megatron-LM's arguments describe, or checks that they match a given model."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

from debubble.frameworks.megatron.arguments import Arguments
from debubble.frameworks.megatron.mindspeed import is_mindspeed
from debubble.frameworks.megatron.swift import SWIFT, with_further_layers
from debubble.imports.model import ExpertSizes, LatentSizes, Sizes
from debubble.imports.training_scripts import SCRIPT, is_family_script
from debubble.ir import InputError
from debubble.models import Model, hub_model, models

_UNSUPPORTED_ARGUMENTS = re.compile(
    r"--(hybrid-attention-ratio|hybrid-mlp-ratio|heterogeneous-layers.*|linear-attention-.*|encoder-num-layers|spec"
    r"|experimental-attention-variant|qk-l2-norm|lfm-layer-types|index-.*|moe-latent-size|language-model-type"
    r"|vision-model-type|disable-vision-class-token|patch-size|mrope-section|model-provider|task)"
)
"""Arguments of unsupported layers."""
_ZERO = ("0", "0.0")
"""Values of ratios for a model without such layers."""
_NAMED_MODEL_ARGUMENTS = re.compile(
    r"--(multi-latent-attention|hybrid-.*|is-hybrid-model|mamba-.*|window-.*|softmax-type)"
)
"""Arguments of layers that a model given by name determines."""
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's scaling of rotary positions, constants in Megatron-LM."""
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")


def model_of(arguments: Arguments, specified: Model | None) -> Model:
    """The model that the user gives, the configuration names, or the arguments describe.

    Raises:
        InputError: if they describe an unsupported model, or contradict the given one.
    """
    name = arguments.word("model")
    named = specified or hub_model(name or "")
    if named is not None:
        if arguments.word("framework") == SWIFT:
            named = with_further_layers(named, arguments.count("--mtp-num-layers"))
        return _named_model(named, arguments)
    if name is not None and arguments.word("--hidden-size") is None:
        raise InputError(
            f"{arguments.path} names the model '{name}', which is not known here: give its config.json with --model."
        )
    if arguments.word("framework") == "megatron-bridge" and arguments.word("--hidden-size") is None:
        raise InputError(f"{arguments.path} names no model, and its recipe does: give it with --model.")
    return _described_model(arguments)


def _described_model(arguments: Arguments) -> Model:
    """The model described by the sizes in the arguments; defaults are from Megatron-LM's arguments.py."""
    pattern = next((word for name in _PATTERNS if (word := arguments.word(name)) is not None), None)
    _check_layers(arguments, pattern)
    if pattern is not None:
        return _hybrid_model(arguments, pattern)
    hidden, heads = arguments.size("--hidden-size"), arguments.size("--num-attention-heads")
    activation = _activation(arguments)
    gated = activation == "swiglu"
    narrow = arguments.flag("--swiglu")
    ffn = arguments.size("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if narrow else 4 * hidden)
    layers = arguments.size("--num-layers")
    return Sizes(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(arguments, heads),
        head_dim=arguments.size("--kv-channels", hidden // heads),
        ffn=ffn,
        vocab=vocabulary(arguments),
        activation=activation,
        rms_norm=(arguments.word("--normalization") or "").lower() == "rmsnorm",
        positions=_positions(arguments),
        tied=not arguments.flag("--untie-embeddings-and-output-weights"),
        qkv_bias=arguments.flag("--add-qkv-bias"),
        linear_bias=has_biases(arguments) and not gated,
        qk_norm=arguments.flag("--qk-layernorm"),
        post_norm=is_mindspeed(arguments.settings) and arguments.flag("--post-norm"),
        length=arguments.size("--max-position-embeddings", 4096),
        experts=_experts(arguments, layers, ffn),
        latent=_latent(arguments),
        mtp_layers=arguments.count("--mtp-num-layers"),
        attention_dropout=dropout(arguments, "--attention-dropout"),
        hidden_dropout=dropout(arguments, "--hidden-dropout"),
        norm_eps=arguments.share("--norm-epsilon", _NORM_EPSILON),
        initializer_range=_init_method_std(arguments),
        rotary=_rotary(arguments),
    ).model()


_NORM_EPSILON, _INIT_METHOD_STD = 1e-5, 0.02
_ROTARY_BASE, _ROPE_FACTOR = 10000.0, 8.0
"""Megatron-LM's defaults."""


def _rotary(arguments: Arguments) -> dict[str, Any]:
    """The base of rotary positions, and Llama 3's scaling, as entries of a Hugging Face config."""
    base = {"rope_theta": _positive(arguments, "--rotary-base", _ROTARY_BASE)}
    if not arguments.flag("--use-rope-scaling"):
        return base
    factor = _positive(arguments, "--rope-scaling-factor", _ROPE_FACTOR)
    return {**base, "rope_scaling": {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}}


def _positive(arguments: Arguments, name: str, default: float) -> float:
    """A positive number, or the default if the script computes it; raises InputError for other values."""
    word = arguments.word(name, str(default)) or ""
    if "$" in word:
        return default
    try:
        number = float(word)
    except ValueError:
        number = -1.0
    if not 0 < number < math.inf:
        raise InputError(f"{arguments.path}: {name} is '{word}', which is no positive number.")
    return number


def dropout(arguments: Arguments, name: str) -> float:
    """The probability of a dropout; by default Megatron-LM's 0.1, and 0 in files of other frameworks."""
    word = arguments.word(name)
    if word is None or "$" in word:
        return 0.1 if arguments.defaults.source == "Megatron-LM" else 0.0
    return arguments.share(name)


def has_biases(arguments: Arguments) -> bool:
    """Tell whether linear layers have biases, which --disable-bias-linear or a YAML entry turns off."""
    said = {**arguments.defaults.values, **arguments.settings}.get("--add-bias-linear")
    return not arguments.flag("--disable-bias-linear") and said is not False


def _kv_heads(arguments: Arguments, heads: int) -> int:
    """The number of key-value heads, also by the arguments of Megatron-DeepSpeed and BigCode's fork."""
    shared = arguments.word("--attention-head-type") == "multiquery"
    of_fork = arguments.size("--num-key-value-heads", 1 if shared else heads)
    grouped = arguments.flag("--group-query-attention")
    return arguments.size("--num-query-groups", of_fork) if grouped else of_fork


def _activation(arguments: Arguments) -> str:
    if arguments.flag("--squared-relu"):
        return "squared_relu"
    gates = ("--swiglu", "--quick-geglu")
    return (
        "swiglu" if any([arguments.flag(name) for name in gates]) else arguments.word("--glu-activation", "gelu") or ""
    )


def _positions(arguments: Arguments) -> str:
    """The kind of position embedding; models without one, or with another rotation, cost as much as rotary ones."""
    kind = arguments.word("--position-embedding-type", "learned_absolute")
    without = arguments.flag("--no-position-embedding")
    if kind == "alibi":
        return "alibi"
    rotates = arguments.flag("--use-rotary-position-embeddings")
    return "learned" if kind == "learned_absolute" and not (rotates or without) else "rotary"


def _latent(arguments: Arguments) -> LatentSizes | None:
    if not arguments.flag("--multi-latent-attention"):
        return None
    return LatentSizes(
        query_rank=arguments.count("--q-lora-rank") or None,
        rank=arguments.size("--kv-lora-rank", 32),
        content=arguments.size("--qk-head-dim", 128),
        rotary=arguments.size("--qk-pos-emb-head-dim", 64),
        value=arguments.size("--v-head-dim", 128),
    )


def _experts(arguments: Arguments, layers: int, ffn: int) -> ExpertSizes | None:
    """The experts; None for dense models, including Megatron-DeepSpeed's default of one expert."""
    if len(arguments.words("--num-experts")) > 1:
        raise InputError(
            f"{arguments.path}: --num-experts has a number for each layer, which is not read here: give the model's"
            " config.json with --model."
        )
    count = arguments.count("--num-experts")
    if count in (0, 1):
        arguments.get("--moe-shared-expert-intermediate-size")
        return None
    sparse = _sparse_layers(arguments, layers)
    return ExpertSizes(
        count=count,
        per_token=arguments.size("--moe-router-topk", 2),
        ffn=arguments.count("--moe-ffn-hidden-size") or ffn,
        dense=tuple(layer for layer in range(layers) if not sparse[layer]),
        shared=arguments.count("--moe-shared-expert-intermediate-size"),
        gate=arguments.flag("--moe-shared-expert-gate"),
        sinks=_has_windows(arguments),
    )


def _has_windows(arguments: Arguments) -> bool:
    """Tell whether every second layer has a sliding window, as in gpt-oss."""
    arguments.get("--softmax-type")
    skips = "".join(arguments.words("--window-attn-skip-freq")).replace(",", "")
    return "--window-size" in arguments and re.fullmatch("2|(10)+", skips) is not None


def _sparse_layers(arguments: Arguments, layers: int) -> list[bool]:
    """The layers with experts: every n-th from the first, or a list such as `([0]*3+[1]*58)`."""
    name = "--moe-layer-freq"
    text = re.sub("[ '\"]", "", arguments.word(name) or "1")
    if text.isdigit() and int(text):
        return [layer % int(text) == 0 for layer in range(layers)]
    try:
        listed = _list_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{arguments.path}: {name} is '{text}', which is neither a number nor a list.") from error
    if len(listed) != layers:
        raise InputError(f"{arguments.path}: {name} is for {len(listed)} layers, and the model has {layers}.")
    return listed


def _list_of(node: ast.expr) -> list[bool]:
    """A list of zeros and ones written with + and *; raises ValueError for other expressions."""
    match node:
        case ast.List(elts=elements):
            return [bool(ast.literal_eval(element)) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*_list_of(left), *_list_of(right)]
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() as times)) if times < 1000:
            return _list_of(left) * times
        case _:
            raise ValueError


def _hybrid_model(arguments: Arguments, pattern: str) -> Model:
    """Nemotron-H: a pattern of state-space, attention, MLP and MoE layers, with optional `|` between stages."""
    kinds = pattern.partition("/")[0].replace("|", "")
    if not arguments.flag("--squared-relu") and set(kinds) & set("-E"):
        raise InputError(
            f"{arguments.path}: MLPs of the pattern {pattern} with the activation {_activation(arguments)} are not read"
            " here, only those with --squared-relu: give the model's config.json with --model."
        )
    hidden, heads = arguments.size("--hidden-size"), arguments.size("--num-attention-heads")
    for name in (*_MODEL_ARGUMENTS, *arguments.names):
        if name in _MODEL_ARGUMENTS or _NAMED_MODEL_ARGUMENTS.fullmatch(name):
            arguments.get(name)
    experts = _experts(arguments, len(kinds), arguments.size("--ffn-hidden-size", 4 * hidden))
    routed = {} if experts is None else {
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.ffn, "moe_shared_expert_intermediate_size": experts.shared,
    }  # fmt: skip
    return Model.from_hf(
        {
            "model_type": "nemotron_h", "hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds),
            "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": _kv_heads(arguments, heads),
            "head_dim": arguments.size("--kv-channels", hidden // heads), "vocab_size": vocabulary(arguments),
            "intermediate_size": arguments.size("--ffn-hidden-size", 4 * hidden),
            "tie_word_embeddings": not arguments.flag("--untie-embeddings-and-output-weights"),
            "mamba_head_dim": arguments.size("--mamba-head-dim", 64),
            "mamba_num_heads": arguments.size("--mamba-num-heads", 2 * hidden // 64),
            "n_groups": arguments.size("--mamba-num-groups", 8),
            "ssm_state_size": arguments.size("--mamba-state-dim", 128), **routed,
        }
    )  # fmt: skip


def _init_method_std(arguments: Arguments) -> float:
    """The standard deviation of initial weights, which costs nothing; the default if the file does not tell it."""
    is_open = "$" in (arguments.word("--init-method-std") or "")
    return _INIT_METHOD_STD if is_open else arguments.share("--init-method-std", _INIT_METHOD_STD)


def _check_layers(arguments: Arguments, pattern: str | None) -> None:
    """Raise InputError if the arguments describe unsupported layers."""
    script = arguments.word(SCRIPT)
    plain = _activation(arguments) == "gelu"
    if script is not None and pattern is None and (plain or not is_family_script(Path(script).stem)):
        raise InputError(
            f"{arguments.path} runs {script}, which trains no GPT that is read from arguments: give its config.json"
            " with --model."
        )
    if arguments.flag("--deepspeed") and _experts(arguments, 1, 1):
        raise InputError(
            f"{arguments.path}: Megatron-DeepSpeed has experts in every second layer or as --expert-interval says,"
            " which is not read here: give the model's config.json with --model."
        )
    unsupported = [
        name
        for name in arguments.names
        if _UNSUPPORTED_ARGUMENTS.fullmatch(name) and name in arguments and str(arguments.get(name)) not in _ZERO
    ]
    if arguments.word("--model-type", "gpt") != "gpt" and pattern is None:
        unsupported.append("--model-type")
    tokenizer = arguments.word("--tokenizer-type")
    if (tokenizer or "").startswith("Bert"):
        unsupported.append("--tokenizer-type")
    elif tokenizer is None and "--vocab-file" in arguments and "--merge-file" not in arguments:
        # WordPiece, as in BERT and T5; Megatron-LM's other vocabulary files come with merges.
        unsupported.append("--vocab-file without --merge-file")
    if "--window-size" in arguments and not (_has_windows(arguments) and "--num-experts" in arguments):
        unsupported.append("--window-size")
    if unsupported:
        raise InputError(
            f"{arguments.path}: {' '.join(unsupported)} describes layers that are not read here: give the model's"
            " config.json with --model."
        )


def _named_model(model: Model, arguments: Arguments) -> Model:
    """The given model; raises InputError if the arguments have other sizes."""
    for name, size in (
        ("--num-layers", model.layers), ("--hidden-size", model.hidden), ("--num-attention-heads", model.heads)
    ):  # fmt: skip
        if arguments.size(name, size) != size:
            raise InputError(
                f"{arguments.path} says {name} {arguments.word(name)}, but the model has {size}: give the right one"
                " with --model."
            )
    for name in (*_MODEL_ARGUMENTS, SCRIPT, "model"):
        arguments.get(name)
    for name in arguments.names:
        if _UNSUPPORTED_ARGUMENTS.fullmatch(name) or _NAMED_MODEL_ARGUMENTS.fullmatch(name):
            arguments.get(name)
    if arguments.count("--mtp-num-layers", model.mtp_layers) != model.mtp_layers:
        raise InputError(
            f"{arguments.path} says --mtp-num-layers {arguments.word('--mtp-num-layers')}, but the model predicts"
            f" {model.mtp_layers} further tokens: set num_nextn_predict_layers in its config.json,"
            f" or give --args '--mtp-num-layers {model.mtp_layers}'."
        )
    return model


_MODEL_ARGUMENTS = (
    "--ffn-hidden-size", "--swiglu", "--vocab-size", "--padded-vocab-size", "--group-query-attention",
    "--num-query-groups", "--num-key-value-heads", "--kv-channels", "--normalization", "--position-embedding-type",
    "--max-position-embeddings",
    "--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights", "--add-qkv-bias", "--qk-layernorm",
    "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-layer-freq", "--q-lora-rank",
    "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--moe-shared-expert-intermediate-size",
    "--moe-shared-expert-gate", "--squared-relu", "--quick-geglu", "--glu-activation", "--pad-vocab-size-to",
    "--no-position-embedding", "--attention-head-type",
)  # fmt: skip
"""Arguments that a model's config determines."""


def vocabulary(arguments: Arguments) -> int:
    """The padded vocabulary size; raises InputError if neither it nor the tokenizer is known."""
    named = arguments.count("--padded-vocab-size") or arguments.count("--pad-vocab-size-to")
    padded = named or _patch_vocabulary(arguments)
    if padded:
        arguments.get("--vocab-size")
        return padded
    words = arguments.count("--vocab-size") or _tokenizer_vocabulary(arguments)
    if words is None:
        raise InputError(
            f"{arguments.path} does not say --vocab-size, which Megatron-LM takes from the tokenizer: give it with"
            f" --args '--vocab-size N'{_similar_vocabularies(arguments)}, the model with --model, or a log with the"
            " padded_vocab_size that it prints."
        )
    if arguments.word("framework") == "megatron-bridge":
        return words
    multiple = arguments.size("--make-vocab-size-divisible-by", 128) * arguments.size("--tensor-model-parallel-size", 1)
    return -(-words // multiple) * multiple


def _similar_vocabularies(arguments: Arguments) -> str:
    """The vocabulary sizes of known models with the same sizes, in parentheses; empty if there are none."""
    names = ("--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size")
    sizes = tuple(arguments.count(name) for name in names)
    known = {name: models[name] for name in models}
    like = {m.vocab: name for name, m in known.items() if (m.layers, m.hidden, m.heads, m.ffn) == sizes}
    said = [f"{words} of {name}" for words, name in like.items()]
    return f" (such as the {' or the '.join(said)})" if said else ""


def _tokenizer_vocabulary(arguments: Arguments) -> int | None:
    """The vocabulary size of the tokenizer; None if the tokenizer is unknown."""
    kind = arguments.word("--tokenizer-type") or (GPT2 if uses_gpt2_vocabulary(arguments) else "")
    fixed = _TOKENIZERS.get(kind)
    if fixed is not None and kind != LLAMA2:
        return fixed
    name = _tokenizer_name(arguments)
    model = hub_model(name)
    return model.vocab if model is not None else fixed or _TOKENIZERS.get(name.rpartition("/")[2])


def _tokenizer_name(arguments: Arguments) -> str:
    """The tokenizer's file, folder or hub name; empty if there is none."""
    names = [arguments.word(name) or "" for name in ("--tokenizer-model", "--tokenizer-name-or-path")]
    return next(filter(None, names), "").rstrip("/")


def guesses_vocabulary(arguments: Arguments) -> bool:
    """Tell whether the vocabulary is taken to be Llama 2's although the tokenizer's file may be of another model."""
    if arguments.word("--tokenizer-type") != LLAMA2:
        return False
    name = _tokenizer_name(arguments)
    specified = any(word in arguments for word in ("--vocab-size", "--padded-vocab-size", "--pad-vocab-size-to"))
    return not specified and hub_model(name) is None and "llama" not in name.lower()


def _patch_vocabulary(arguments: Arguments) -> int:
    """Pai-Megatron-Patch's vocabulary size, not padded: the tokenizer's words plus extra ones; 0 if unknown."""
    kind, further = arguments.word("--patch-tokenizer-type", ""), arguments.count("--extra-vocab-size")
    if kind == "DeepSeekV2Tokenizer":
        return {2400: 102400, 467: 129280}.get(further, 0)  # DeepSeek-V2's and V3's
    base = _PATCH_TOKENIZERS.get(kind or "")
    return 0 if base is None else base + further


_PATCH_TOKENIZERS = {
    **dict.fromkeys(("Qwen2Tokenizer", "Qwen3Tokenizer", "Qwen2VLTokenizer"), 151643),
    **dict.fromkeys(("LLamaTokenizer", "LLama2Tokenizer", "MistralTokenizer", "MixtralTokenizer"), 32000),
    "LLama3Tokenizer": 128000,
}
"""Vocabulary sizes of the tokenizers of Pai-Megatron-Patch (megatron_patch/tokenizer)."""


def uses_gpt2_vocabulary(arguments: Arguments) -> bool:
    """Tell whether the tokenizer is pretrain_gpt.py's default, GPT-2's, whose files the arguments name."""
    said = ("--tokenizer-type", "--tokenizer-model", "--vocab-size", "--padded-vocab-size")
    return bool(arguments.settings.get("--merge-file")) and not any(arguments.settings.get(name) for name in said)


GPT2, LLAMA2 = "GPT2BPETokenizer", "Llama2Tokenizer"
_TOKENIZERS = {
    GPT2: 50257, LLAMA2: 32000, "Llama3Tokenizer": 128256, "MixtralTokenizer": 32000,
    "Llama4Tokenizer": 202048, "DeepSeekV2Tokenizer": 102400, "DeepSeekV3Tokenizer": 129280, "MiniMax-M2": 200064,
    "MiniMax-M2.5": 200064, "t5-small": 32100, "mt5-base": 250100, "gpt2": 50257, "tokenizer": 250680,
}  # fmt: skip
"""Type or hub name of a tokenizer -> its vocabulary size (`bigscience/tokenizer` is BLOOM's)."""
