"""Generation with a pipeline's forwards gives the tokens of transformers' model."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from tests.support.generic_cases import GENERIC
from tests.support.hf_reference import exactly, hf_model
from tests.support.runtime_cases import plan_of, run_threads, tokens_of
from tests.support.tiny_models import GPT2, LLAMA, MIXTRAL

BALANCED = {**MIXTRAL, "output_router_logits": True}


@pytest.mark.parametrize(
    ("config", "name", "options"),
    [
        (LLAMA, "zb-v", {"data": 2, "zero": 2}),
        (LLAMA, "1f1b", {"tensor": 2}),
        ({**GPT2, "resid_pdrop": 0.3}, "interleaved", {}),
        (BALANCED, "1f1b", {}),
        (GENERIC["olmo2"], "1f1b", {}),
    ],
)
def test_greedy_tokens_match_transformers(config: Any, name: str, options: Any) -> None:
    prompts = tokens_of(config, rows=3, length=4)
    plan = plan_of(db.schedules[name](devices=2, micro_batches=4), config, **options)
    model = hf_model(config).eval()
    state = model.state_dict()

    def generate(pipeline: Any) -> Any:
        pipeline.load_state_dict(state)
        return pipeline.generate(prompts, new_tokens=6)

    expected = prompts
    for _ in range(6):
        with exactly(), torch.no_grad():
            expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), dim=1)
    for tokens in run_threads(plan, generate, ranks=plan.ranks):
        assert tokens.tolist() == expected.tolist()


def test_sampling_is_seeded_and_does_not_change_training() -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)
    batch, prompts = tokens_of(LLAMA, rows=4), tokens_of(LLAMA, rows=1, length=2)

    def one(pipeline: Any) -> Any:
        samples = [pipeline.generate(prompts, new_tokens=8, temperature=2.0, seed=seed).tolist() for seed in (1, 1, 2)]
        return samples, float(pipeline.step(batch))

    (first, repeated, other), loss = run_threads(plan, one)[0]
    assert first == repeated
    assert first != other
    assert loss == run_threads(plan, lambda pipeline: float(pipeline.step(batch)))[0]


def test_prompts_of_another_shape_are_refused() -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)
    with pytest.raises(InputError, match=r"Prompts have shape \[rows, length\], not \[3\]"):
        run_threads(plan, lambda pipeline: pipeline.generate(torch.zeros(3, dtype=torch.int64), new_tokens=1))
