"""The model that Megatron-LM's arguments describe, or that was named and they must agree with."""

from __future__ import annotations

import re

from debubble.imports.megatron_arguments import Arguments
from debubble.imports.megatron_scripts import SCRIPT
from debubble.imports.model import Sizes, hub_model
from debubble.ir import InputError
from debubble.models import Model

_OTHER_LAYERS = re.compile(
    r"--(multi-latent-attention|hybrid-.*|is-hybrid-model|mamba-.*|heterogeneous-layers.*|linear-attention-.*"
    r"|experimental-attention-variant|window-size|encoder-num-layers|spec|squared-relu|qk-l2-norm)"
)
"""Arguments of layers that are not an attention over all tokens and a plain MLP."""


def model_of(arguments: Arguments, given: Model | None) -> Model:
    """The model that the user gives, the configuration names, or the arguments describe.

    Raises:
        InputError: if they describe none that is known here, or contradict the one that is given.
    """
    name = arguments.word("model")
    named = given or hub_model(name or "")
    if named is not None:
        return _named_model(named, arguments)
    if name is not None and arguments.word("--hidden-size") is None:
        raise InputError(
            f"{arguments.path} names the model '{name}', which is not known here: give its config.json with --model."
        )
    return _described_model(arguments)


def _described_model(arguments: Arguments) -> Model:
    """The model of the sizes in the arguments; defaults are Megatron-LM's own, from its arguments.py."""
    _check_layers(arguments)
    hidden, heads = arguments.size("--hidden-size"), arguments.size("--num-attention-heads")
    gated = "--swiglu" in arguments
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    grouped = "--group-query-attention" in arguments
    positions = arguments.word("--position-embedding-type", "learned_absolute")
    vocab = arguments.number("--padded-vocab-size", 0) or arguments.number("--vocab-size", 0) or _vocabulary(arguments)
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
        experts=_experts(arguments),
        experts_per_token=arguments.number("--moe-router-topk", 2),
        expert_ffn=arguments.number("--moe-ffn-hidden-size", 0) or None,
        mtp_layers=arguments.number("--mtp-num-layers", 0),
    ).model()


def _check_layers(arguments: Arguments) -> None:
    """Raise InputError if the arguments describe layers that are not read here."""
    script = arguments.word(SCRIPT)
    if script is not None:
        raise InputError(
            f"{arguments.path} runs {script}, whose model is no GPT and is not read from arguments: give its"
            " config.json with --model."
        )
    if "--deepspeed" in arguments and _experts(arguments):
        raise InputError(
            f"{arguments.path}: Megatron-DeepSpeed has experts in every second layer or as --expert-interval says,"
            " which is not read here: give the model's config.json with --model."
        )
    unlike = [name for name in arguments.settings if _OTHER_LAYERS.fullmatch(name) and name in arguments]
    if arguments.word("--moe-layer-freq", "1") != "1":
        unlike.append("--moe-layer-freq")
    if unlike:
        raise InputError(
            f"{arguments.path}: {' '.join(unlike)} describes layers that are not read here: give the model's"
            " config.json with --model."
        )


def _experts(arguments: Arguments) -> int:
    """Experts of a layer; Megatron-DeepSpeed's default of one expert is a dense layer."""
    count = arguments.number("--num-experts", 0)
    return 0 if count == 1 else count


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
    for name in (*_OF_THE_MODEL, SCRIPT, "model"):
        arguments.get(name)
    for name in arguments.settings:
        if _OTHER_LAYERS.fullmatch(name):
            arguments.get(name)
    if arguments.number("--mtp-num-layers", model.mtp_layers) != model.mtp_layers:
        raise InputError(
            f"{arguments.path} says --mtp-num-layers {arguments.word('--mtp-num-layers')}, but the model predicts"
            f" {model.mtp_layers} further tokens: set num_nextn_predict_layers in its config.json."
        )
    return model


_OF_THE_MODEL = (
    "--ffn-hidden-size", "--swiglu", "--vocab-size", "--padded-vocab-size", "--group-query-attention",
    "--num-query-groups", "--kv-channels", "--normalization", "--position-embedding-type", "--max-position-embeddings",
    "--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights", "--add-qkv-bias", "--qk-layernorm",
    "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-layer-freq", "--q-lora-rank",
    "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--moe-shared-expert-intermediate-size",
)  # fmt: skip
"""Arguments that a model's config says too."""


def _vocabulary(arguments: Arguments) -> int:
    """The size of a tokenizer's vocabulary, as Megatron-LM pads it; raises InputError if it is not known."""
    name = arguments.word("--tokenizer-model") or ""
    kind = arguments.word("--tokenizer-type") or (GPT2 if takes_gpt2_words(arguments) else "")
    of_model = hub_model(name) if kind == "HuggingFaceTokenizer" else None
    words = of_model.vocab if of_model is not None else _TOKENIZERS.get(kind)
    if words is None:
        raise InputError(
            "The arguments do not say --vocab-size, which Megatron-LM takes from the tokenizer: give the model with"
            " --model, or a log with the padded_vocab_size that it prints."
        )
    multiple = arguments.size("--make-vocab-size-divisible-by", 128) * arguments.size("--tensor-model-parallel-size", 1)
    return -(-words // multiple) * multiple


def takes_gpt2_words(arguments: Arguments) -> bool:
    """Tell whether the vocabulary is that of pretrain_gpt.py's default tokenizer, whose files the arguments name."""
    said = ("--tokenizer-type", "--tokenizer-model", "--vocab-size", "--padded-vocab-size")
    return "--merge-file" in arguments.settings and not any(name in arguments.settings for name in said)


GPT2 = "GPT2BPETokenizer"
_TOKENIZERS = {GPT2: 50257, "Llama2Tokenizer": 32000}
"""Tokenizers of one vocabulary each."""
