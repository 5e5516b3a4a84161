"""All schedules train all families as transformers does, with every recomputation and with or without offload."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch

import debubble as db
from tests.support.covering import CASES, RECOMPUTATIONS, one_per_schedule
from tests.support.runtime_cases import assert_gradients, gradient_of, run_threads, tokens_of
from tests.support.tiny_models import FAMILIES

pytest.importorskip("transformers")

from tests.support.hf_reference import hf_model, loss_of

ROWS = 8
ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)


def test_cases_cover_every_family_and_recomputation() -> None:
    ways = {(recompute, offloads) for recompute in RECOMPUTATIONS for offloads in (False, True)}
    assert {(c.schedule, c.family) for c in CASES} == {(s, f) for s in db.schedules for f in FAMILIES}
    assert {(c.schedule, c.recompute, c.offloads) for c in CASES} == {(s, *way) for s in db.schedules for way in ways}
    assert {(c.family, c.recompute, c.offloads) for c in CASES} == {(f, *way) for f in FAMILIES for way in ways}


@pytest.mark.parametrize("first_family", [0, 1])
def test_one_case_per_schedule_covers_families_and_options(first_family: int) -> None:
    cases = one_per_schedule(first_family=first_family)
    assert {c.family for c in cases} == set(FAMILIES)
    assert len({(c.recompute, c.offloads) for c in cases}) == 2 * len(RECOMPUTATIONS)


def batch(config: Any, step: Any) -> Any:
    return tokens_of(config, rows=ROWS, seed=step)


@cache
def trained_by_transformers(family: Any, steps: Any) -> Any:
    """Initial weights, the losses of all steps, and the gradients of the first."""
    model = hf_model(FAMILIES[family])
    untrained, config, optimizer = copy.deepcopy(model), model.config.to_dict(), ADAMW(model.parameters())
    losses: list[Any] = []
    gradients: dict[str, Any] = {}
    for step in range(steps):
        losses.append(loss_of(model, batch(config, step), micro_batches=1))
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return untrained, torch.stack(losses), gradients


def check(case: Any, *, steps: Any) -> None:
    """Compare the plan's gradients and losses with transformers', to a relative 1e-12."""
    model, expected_losses, expected = trained_by_transformers(case.family, steps)
    config, plan = model.config.to_dict(), case.plan()

    def train(pipeline: Any) -> Any:
        losses: list[Any] = []
        gradients: dict[str, Any] = {}
        for step in range(steps):
            losses.append(pipeline.step(batch(config, step)))
            gradients = gradients or {name: gradient_of(p).clone() for name, p in pipeline.named_parameters()}
            pipeline.optimizer_step()
        return torch.stack(losses), gradients, pipeline.measured.peak_offloaded

    answers = run_threads(plan, train, model=model, optimizer=ADAMW)
    actual = {name: gradient for _, gradients, _ in answers for name, gradient in gradients.items()}
    for losses, _, offloaded in answers:
        torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=0)
        assert offloaded > 0 or not case.offloads
    assert expected.keys() <= actual.keys()
    assert_gradients({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize("case", one_per_schedule(first_family=0), ids=str)
def test_every_schedule_trains_like_transformers(case: Any) -> None:
    check(case, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twenty_steps_of_every_case_match_transformers(case: Any) -> None:
    check(case, steps=20)
