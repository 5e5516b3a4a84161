"""Tensor parallelism: losses, gradients, norms and files match one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.models import ModelConfig
from debubble.runtime.distributed.cuts import Cut
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.distributed.thread_transport import ThreadTransport
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.loss import cross_entropy, divided_cross_entropy
from tests.support import gloo_ranks
from tests.support.generic_cases import GENERIC
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import (
    assert_gradients,
    gradient_of,
    losses_alone,
    plan_of,
    reference_gradients,
    run_threads,
    slow_unless,
    tokens_of,
    train,
)
from tests.support.tiny_models import FAMILIES, GPT2, LLAMA, MIXTRAL

pytest.importorskip("transformers")

pytest.importorskip("peft")

import transformers

from tests.support.hf_reference import assert_checkpoint_returns, assert_trains_as_alone, exactly, hf_model, peft_model

# peft warns of names that transformers will change, and of what it derives from a config.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")
]

EVEN = {"vocab_size": 62}
SMALL = {**LLAMA, **EVEN}
TIED = {**SMALL, "tie_word_embeddings": True}


def schedule(name: str = "1f1b", devices: int = 2, micro_batches: int = 4) -> Any:
    return db.schedules[name](devices=devices, micro_batches=micro_batches)


def merged(answers: Any) -> Any:
    """Merge the answers of the ranks by name; equal names must have equal tensors."""
    tensors: dict[str, Any] = {}
    for answer in answers:
        for name, tensor in answer.items():
            torch.testing.assert_close(tensors.setdefault(name, tensor), tensor, rtol=0, atol=0)
    return tensors


def whole_gradients(pipeline: Any) -> Any:
    """Replace parameters by their gradients, which `state_dict` then joins."""
    with torch.no_grad():
        for _, parameter in pipeline.named_parameters():
            parameter.copy_(gradient_of(parameter))
    return pipeline.state_dict()


@pytest.mark.parametrize("family", slow_unless(FAMILIES, "gpt2", "mixtral"))
def test_two_by_two_ranks_match_transformers_gradients(family: Any) -> None:
    model = hf_model(FAMILIES[family])
    strategy = "none" if family == "gpt2" else "full"
    plan = plan_of(schedule("zb-h1"), model.config.to_dict(), strategy=strategy, tensor=2)
    assert_trains_as_alone(model, plan, tokens_of(FAMILIES[family], rows=4))


@pytest.mark.parametrize(
    "family",
    slow_unless(["granite", "starcoder2", "smollm3", "cohere2", "gpt_neox", "phi", "helium"], "smollm3", "gpt_neox"),
)
def test_transformers_modules_use_their_sharding_plan(family: str) -> None:
    model = hf_model(GENERIC[family])
    strategy = "none" if family == "gpt_neox" else "full"
    plan = plan_of(schedule("zb-h1"), model.config.to_dict(), strategy=strategy, tensor=2)
    assert_trains_as_alone(model, plan, tokens_of(GENERIC[family], rows=4), within=exactly)


def test_training_losses_match_one_process() -> None:
    make = partial(torch.optim.AdamW, lr=3e-3)
    batches = [tokens_of(TIED, rows=4, seed=seed) for seed in range(3)]
    plan = plan_of(schedule(micro_batches=2), TIED, tensor=2, data=2, zero=2)
    model = ReferenceModel(TIED, dtype=torch.float64)
    expected = losses_alone(model, make(model.parameters()), batches, max_norm=1.0)
    for losses in run_threads(plan, lambda pipeline: train(pipeline, batches, max_norm=1.0), optimizer=make):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_rank_holds_only_its_shards_and_activations() -> None:
    def one(pipeline: Any) -> Any:
        pipeline.step(tokens_of(SMALL, rows=1))
        return pipeline.measured.static_bytes, pipeline.measured.peak_activation

    plans = [plan_of(schedule(devices=1, micro_batches=1), SMALL, tensor=tensor) for tensor in (1, 2)]
    (full, full_activation), (shard, shard_activation) = (run_threads(p, one, ranks=p.ranks)[0] for p in plans)
    norms = 9 * SMALL["hidden_size"] * 8 * 2  # parameters and gradients in fp64
    assert shard - norms == (full - norms) / 2
    assert shard_activation < full_activation


def test_offload_moves_the_ranks_shards() -> None:
    tokens = tokens_of(MIXTRAL, rows=4)
    plan = plan_of(schedule("pipeoffload"), MIXTRAL, tensor=2)
    answers = run_threads(plan, lambda p: (p.step(tokens), p.measured.peak_offloaded))
    expected, _ = reference_gradients(MIXTRAL, tokens, micro_batches=4)
    for loss, _ in answers:
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert max(offloaded for _, offloaded in answers) > 0


DROPPING = {"gpt2": {**GPT2, "resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3}}
DROPPING["llama"] = {**LLAMA, "attention_dropout": 0.3}


@pytest.mark.parametrize(("family", "strategy"), [("gpt2", "full"), ("llama", "none")])
def test_dropout_of_tensor_ranks_matches_one_rank(family: Any, strategy: str) -> None:
    tokens = tokens_of(DROPPING[family], rows=2)

    def one(pipeline: Any) -> Any:
        return pipeline.step(tokens), whole_gradients(pipeline)

    plans = [plan_of(schedule(micro_batches=2), DROPPING[family], tensor=t, strategy=strategy) for t in (1, 2)]
    undivided, divided = (run_threads(plan, one, ranks=plan.ranks) for plan in plans)
    torch.testing.assert_close(divided[0][0], undivided[0][0], rtol=1e-12, atol=0)
    expected, actual = (merged(state for _, state in answers) for answers in (undivided, divided))
    assert_gradients({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize(("family", "targets"), [("gpt2", "all-linear"), ("qwen3-moe", ["k_proj", "o_proj"])])
def test_sharded_adapters_match_peft_gradients(family: str, targets: Any) -> None:
    config = FAMILIES[family]
    model = peft_model(config, target_modules=targets)
    plan = plan_of(schedule("zb-h1"), model.config.to_dict(), lora=3, tensor=2)
    assert_trains_as_alone(model, plan, tokens_of(config, rows=4))


@pytest.mark.parametrize("config", [GPT2, MIXTRAL], ids=["gpt2", "mixtral"])
def test_checkpoint_round_trip_changes_nothing(config: Any, tmp_path: Path) -> None:
    assert_checkpoint_returns(config, tmp_path, tensor=2)


def test_four_gloo_ranks_match_one_process(tmp_path: Path) -> None:
    gloo_ranks.assert_norm_over_gloo(plan_of(schedule("zb-h1"), TIED, tensor=2), tokens_of(TIED, rows=4), tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "mixtral"])
def test_units_are_sharded_by_transformers_plan(family: str) -> None:
    config = FAMILIES[family]
    theirs = transformers.AutoConfig.for_model(**config).base_model_tp_plan
    assert theirs is not None
    units = build_stage(config, ModelConfig.from_hf(config).units[1:3])
    ours = {f"layers.*.{path}": "colwise" for unit in units for path in unit.columns}
    ours |= {f"layers.*.{path}": "rowwise" for unit in units for path in unit.rows}
    for path, cut in ((path, cut) for unit in units for path, cut in unit.cuts().items() if "experts" in path):
        ours[f"layers.*.{path}"] = "packed_colwise" if cut.fused == 2 else "rowwise"
    assert ours == {name: how for name, how in theirs.items() if how in ("colwise", "rowwise", "packed_colwise")}


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 13), (torch.bfloat16, 12)])
def test_loss_of_sharded_logits_matches_full_logits(dtype: Any, size: int) -> None:
    full_logits = torch.randn(2, 5, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    targets = torch.tensor([[0, 3, 11, -100, 6], [5, 5, -100, 2, 8]])
    logits = full_logits.clone().requires_grad_()
    expected = cross_entropy(logits, targets)
    expected.backward()

    def one(transport: Any) -> Any:
        group = TensorGroup(transport, (0, 1, 2))
        shard = group.local_shard(full_logits, Cut(2, size)).clone().requires_grad_()
        loss = divided_cross_entropy(shard, targets, group=group, vocab=size)
        loss.backward()
        return loss.detach(), shard.grad

    answers = ThreadTransport.run(3, one)
    for loss, _ in answers:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12 if dtype is torch.float64 else 1e-5, atol=0)
    torch.testing.assert_close(torch.cat([g for _, g in answers], 2), logits.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SMALL, "num_key_value_heads": 1}, "1 key-value heads cannot be divided among 2"),
        ({**MIXTRAL, "intermediate_size": 25}, "25 columns of the MLP cannot be divided among 2"),
        ({**SMALL, "vocab_size": 1}, "vocabulary of 1 leaves nothing"),
        (GENERIC["olmo2"], "plan has 'colwise_gather_output' for 'self_attn.q_proj'"),
        (GENERIC["stablelm"], "transformers has no plan for it"),
        (GENERIC["qwen2_moe"], "plan has 'packed_colwise' for 'mlp.experts.gate_up_proj'"),
        ({**GENERIC["cohere"], "use_qk_norm": True}, "leaves 'self_attn.q_norm.weight' to the ranks"),
        ({**GENERIC["granite"], "attention_dropout": 0.1}, "set 'attention_dropout' to 0"),
        ({**GENERIC["phi"], "num_key_value_heads": 1}, "1 key-value heads cannot be divided among 2"),
    ],
)
def test_indivisible_tensor_sizes_are_refused(config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_threads(plan_of(schedule(), config, tensor=2), lambda _: None, ranks=4)
