"""Small models, and the comparison of a plan's step with one process, that the runtime's tests share."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from debubble.ir import RunOptions, StageCosts
from debubble.models import ModelConfig
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads
from debubble.runtime.steps.batch import BatchFormat, read_batch
from tests.support.model_cases import entries_of, on_cpus
from tests.support.reference_model import ReferenceModel
from tests.support.schedule_cases import recomputing

CPU = torch.device("cpu")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.3,
}  # fmt: skip
LLAMA_TIED = {**LLAMA, "tie_word_embeddings": True}
LLAMA3_ROPE = {
    **LLAMA,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_scaling": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 8, "head_dim": 8}
QWEN2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "use_sliding_window": False}
QWEN2_WINDOWED = {**QWEN2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
GEMMA = {
    **LLAMA, "model_type": "gemma", "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "pad_token_id": 0,
}  # fmt: skip
GEMMA2 = {
    **GEMMA, "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5,
    "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
}  # fmt: skip
GEMMA3 = {
    **GEMMA2, "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "norm_topk_prob": False, "mlp_only_layers": [1],
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 61,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
GPT2_UNTIED = {**GPT2, "tie_word_embeddings": False}

FAMILIES = {
    "llama": LLAMA, "llama-tied": LLAMA_TIED, "llama3-rope": LLAMA3_ROPE, "mistral": MISTRAL, "qwen2": QWEN2,
    "qwen2-windowed": QWEN2_WINDOWED, "qwen3": QWEN3, "gemma": GEMMA, "gemma2": GEMMA2, "gemma3": GEMMA3, "gpt2": GPT2,
    "mixtral": MIXTRAL, "qwen3-moe": QWEN3_MOE,
}  # fmt: skip
"""One small model of every family, and of what families have in variants."""


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The model with another number of layers."""
    return {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}


def plan_of(
    schedule: Any,
    config: Any,
    *,
    strategy: str = "none",
    counts: Any = None,
    dtype: str = "fp64",
    costs: Any = None,
    **options: Any,
) -> Plan:
    """A plan for a schedule: the model's units in (nearly) equal runs, or `counts` of them per stage.

    Without `costs` its transfers stream.

    With a strategy every stage recomputes in its backwards, unless the schedule says itself which do.
    """
    if strategy != "none":
        schedule = recomputing(schedule)
    units = [replace(u, strategy=strategy) for u in ModelConfig.from_hf(config).units]
    if counts is None:
        bounds = [round(i * len(units) / schedule.stages) for i in range(schedule.stages + 1)]
    else:
        bounds = list(itertools.accumulate(counts, initial=0))
    return Plan(
        planner="test",
        schedule=schedule,
        costs=costs
        or StageCosts.of(
            stages=schedule.stages, offload=1, offload_overlap=0.5, reload_overlap=0.5, recompute_overlap=0.5
        ),
        lower_bound=0,
        partition=tuple(tuple(units[a:b]) for a, b in itertools.pairwise(bounds)),
        model_on_cluster=on_cpus(config),
        options=RunOptions(dtype=dtype, **options),
    )


def tokens_of(config: Any, *, rows: Any, length: int = 12, seed: int = 0) -> Any:
    return torch.randint(
        0, entries_of(config)["vocab_size"], (rows, length + 1), generator=torch.Generator().manual_seed(seed)
    )


def run_threads(plan: Any, work: Any, *, model: Any = None, ranks: Any = None, **arguments: Any) -> Any:
    """`work(pipeline)` on every rank of a plan, on threads; the answers by rank."""
    return Threads.run(
        ranks or plan.ranks,
        lambda transport: work(Pipeline(model, plan, transport=transport, **arguments)),
    )


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient that a parameter has by now."""
    assert parameter.grad is not None
    return parameter.grad


def gradients_of(plan: Any, tokens: Any, **arguments: Any) -> Any:
    """Loss, and the gradient of every parameter, of one step of the plan."""

    def one(pipeline: Any) -> Any:
        loss = pipeline.step(tokens)
        return loss, {name: p.grad for name, p in pipeline.named_parameters()}

    answers = run_threads(plan, one, **arguments)
    return answers[0][0], {name: g for _, gradients in answers for name, g in gradients.items()}


def reference_gradients(
    config: Any, tokens: Any, *, micro_batches: Any, dtype: Any = torch.float64, device: Any = CPU
) -> Any:
    """The same of the whole model in one process: plain autograd, micro-batch by micro-batch."""
    model = ReferenceModel(entries_of(config), dtype=dtype).to(device)
    batch = read_batch(
        tokens, micro_batches=micro_batches, device=device, accepted=BatchFormat(has_positions=True, has_masks=True)
    )
    total = torch.zeros((), dtype=torch.float64, device=device)
    for x, micro_batch in zip(*batch.micro_batches(scale=1 / batch.counted, seed=0), strict=True):
        loss = model(x, micro_batch)
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.hf_parameters().items()}


def assert_same_gradients(plan: Any, config: Any, tokens: Any) -> None:
    """The plan's step gives the reference's loss and gradients, to a relative 1e-12."""
    loss, gradients = gradients_of(plan, tokens)
    expected_loss, expected = reference_gradients(config, tokens, micro_batches=plan.micro_batches)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert expected.keys() - gradients.keys() <= {"lm_head.weight"}
    assert_gradients(gradients, expected)


def assert_gradients(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    relative: float = 1e-12,
    absolute: float = 0.0,
) -> None:
    """Each gradient that is found is the expected one of its name, to a share of the largest entry of that one."""
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= relative * expected[name].abs().max() + absolute, name
