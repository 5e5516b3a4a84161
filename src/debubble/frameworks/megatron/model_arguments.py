"""Writes the arguments by which Megatron-LM builds a plan's model; `debubble import megatron` reads them back.

Source: Megatron-LM, megatron/training/arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from debubble.frameworks.megatron.model import LLAMA3_SCALING
from debubble.models import Model
from debubble.models.architecture import Experts
from debubble.models.mixers import Attention, Rope
from debubble.plans import Plan
from debubble.targets.target import sparse_layers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe")
"""Hugging Face families that Megatron-LM's arguments can describe."""
_GELUS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh")
_DROPOUT = 0.1
"""Megatron-LM's default dropout probability."""


def model_arguments(plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of the plan's model, and sentences on what they do not express; empty if it is unsupported."""
    model = plan.model
    if model is None:
        return {}, ()
    if (feature := _unsupported_feature(model)) is not None:
        return {}, (f"Arguments of the model are not written for {feature}: add your own to DEBUBBLE_MODEL_ARGS.",)
    vocabulary = -(-model.vocab // plan.options.tensor) * plan.options.tensor
    arguments = {
        **_sizes(model),
        **_positions(model, plan.options.sequence_length),
        **({} if model.tied else {"--untie-embeddings-and-output-weights": True}),
        "--padded-vocab-size": vocabulary,
        **_dropouts(model),
        **({} if model.experts is None else _mixture(model, model.experts)),
    }
    return arguments, (*_lost(model), *_padding(model.vocab, vocabulary))


def _unsupported_feature(model: Model) -> str | None:
    """The feature of a model that Megatron-LM's arguments cannot express; None if there is none."""
    if model.family not in FAMILIES:
        return f"models of the family '{model.family}'"
    if model.beyond_units is not None:
        return f"'{model.family}' with the entry '{model.beyond_units}' in its config"
    if any(layer.window is not None for layer in model.per_layer):
        return "attention with windows"
    linear_bias = not model.gated
    if (model.output_bias, model.mlp_bias) != (linear_bias, linear_bias):
        return "biases of some products alone" if not model.gated else "biases next to a gated MLP"
    if model.activation not in (("silu", "swish") if model.gated else _GELUS):
        return f"the activation '{model.activation}'"
    return None


def _sizes(model: Model) -> dict[str, Any]:
    grouped = {"--group-query-attention": True, "--num-query-groups": model.kv_heads}
    return {
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        **(grouped if model.kv_heads != model.heads else {}),
        "--kv-channels": model.head_dim,
        **({"--swiglu": True, "--disable-bias-linear": True} if model.gated else {}),
        **({"--add-qkv-bias": True} if model.qkv_bias and model.gated else {}),
        **({"--qk-layernorm": True} if model.qk_norm else {}),
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--norm-epsilon": model.norm_eps,
        "--init-method-std": model.initializer_range,
    }


def _positions(model: Model, length: int) -> dict[str, Any]:
    """Learned or rotary positions, at least as many as tokens per sequence."""
    if model.positions:
        return {"--position-embedding-type": "learned_absolute", "--max-position-embeddings": model.positions}
    max_positions = max(length, int(model.config.get("max_position_embeddings") or 0))
    rope = _rope(model)
    return {
        "--position-embedding-type": "rope",
        "--max-position-embeddings": max_positions,
        "--rotary-base": int(rope.theta),
        **({"--use-rope-scaling": True, "--rope-scaling-factor": rope.factor} if _is_of_llama3(rope) else {}),
    }


def _rope(model: Model) -> Rope:
    """The rotary positions, which are the same in all layers of these families."""
    attention = model.per_layer[0].attention
    assert isinstance(attention, Attention)
    assert attention.rope is not None
    return attention.rope


def _is_of_llama3(rope: Rope) -> bool:
    return rope.kind == "llama3" and [rope.low, rope.high, rope.original_length] == [*LLAMA3_SCALING.values()]


def _dropouts(model: Model) -> dict[str, Any]:
    """The dropouts that differ from Megatron-LM's defaults."""
    dropouts = {"--attention-dropout": model.attention_dropout, "--hidden-dropout": model.residual_dropout}
    return {name: share for name, share in dropouts.items() if share != _DROPOUT}


def _mixture(model: Model, experts: Experts) -> dict[str, Any]:
    """Experts, their layers, and softmax before top-k if the routing weights are not normalized to a sum of 1."""
    sparse = sparse_layers(model)
    runs = groupby(int(layer in sparse) for layer in range(model.layers))
    frequency = "+".join(f"[{kind}]*{len(list(run))}" for kind, run in runs)
    return {
        "--num-experts": experts.count,
        "--moe-ffn-hidden-size": experts.ffn,
        "--moe-router-topk": experts.per_token,
        **({"--moe-layer-freq": f"({frequency})"} if len(sparse) < model.layers else {}),
        **({} if experts.renormalised else {"--moe-router-pre-softmax": True}),
    }


def _lost(model: Model) -> Iterator[str]:
    """Sentences on features that cost nothing and that Megatron-LM's arguments cannot express."""
    if model.embedding_dropout != model.residual_dropout:
        yield (
            f"Megatron-LM has one dropout for embeddings and residuals: here {model.residual_dropout:g}, and"
            f" {model.embedding_dropout:g} for the embeddings is lost."
        )
    if model.positions:
        return
    rope = _rope(model)
    if rope.kind != "default" and not _is_of_llama3(rope):
        yield f"Rotary scaling of the type '{rope.kind}' is not written: give Megatron-LM's arguments for it yourself."
    if rope.theta != int(rope.theta):
        yield f"Megatron-LM has whole numbers for the rotary base: {int(rope.theta)} in place of {rope.theta:g}."


def _padding(words: int, padded: int) -> Iterator[str]:
    if padded != words:
        yield f"The vocabulary of {words} words is padded to {padded}, which the tensor-parallel ranks divide."
