"""Any verified program runs to its end with the reference's gradients and frees everything."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from msgspec import UNSET

from debubble.runtime.memory.arena import Arena
from tests.strategies import random_schedules, stage_costs
from tests.support.runtime_cases import (
    assert_gradients,
    loss_and_gradients,
    plan_of,
    reference_gradients,
    run_threads,
    tokens_of,
)
from tests.support.tiny_models import LLAMA_TIED

CONFIG = {**LLAMA_TIED, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
WORDS = st.sampled_from(["none", "full", "core", "norm+multiply", "mlp"])


@cache
def expected(micro_batches: Any) -> Any:
    return reference_gradients(CONFIG, tokens_of(CONFIG, rows=micro_batches, length=6), micro_batches=micro_batches)


@st.composite
def plans(draw: Any) -> Any:
    schedule = draw(random_schedules(shares=True, deeper=True))
    units = 2 * CONFIG["num_hidden_layers"] + 2
    cuts = sorted(draw(st.lists(st.integers(1, units - 1), min_size=schedule.stages - 1, max_size=schedule.stages - 1)))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, units], strict=True)]
    if schedule.devices > 1 and draw(st.booleans()):
        schedule = replace(schedule, peers={0: schedule.devices - 1})
    costs = draw(stage_costs(stages=schedule.stages, offload=True, deeper=True))
    plan = plan_of(schedule, CONFIG, counts=counts, costs=costs)
    partition = tuple(
        tuple(replace(unit, strategy=draw(WORDS), deeper=draw(WORDS | st.just(UNSET))) for unit in stage)
        for stage in plan.partition
    )
    return replace(plan, partition=partition)


def check(plan: Any, **arguments: Any) -> None:
    tokens = tokens_of(CONFIG, rows=plan.micro_batches, length=6)

    expected_loss, gradients = expected(plan.micro_batches)
    for loss, actual in run_threads(plan, partial(loss_and_gradients, batch=tokens), **arguments):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        assert_gradients(actual, gradients)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_random_programs_equal_the_reference(plan: Any) -> None:
    check(plan)


def in_bytes(costs: Any) -> Any:
    """Costs whose activations are about the model's bytes."""
    names = ("activation", "activation_recomputed", "activation_deeper")
    return costs.replace(**{name: [4096 * number for number in getattr(costs, name)] for name in names})


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_random_programs_fit_their_address_plans(plan: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "count", lambda *_: None)  # bytes are drawn, not counted
        check(replace(plan, costs=in_bytes(plan.costs)), arena=True)


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(40))
def test_ten_thousand_random_programs_equal_the_reference(piece: int) -> None:
    """Each shard draws different programs, and always the same ones."""

    @seed(piece)
    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
    @given(plans())
    def check_each(plan: Any) -> None:
        check(plan)

    check_each()
