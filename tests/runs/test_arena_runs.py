"""Plans of units with counted bytes run in arenas of exactly the planned size."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import Kind
from debubble.runtime.memory.arena import ArenaError
from tests.support.run_cases import LLAMA8, batch_for, plan_for
from tests.support.runtime_cases import assert_gradients, reference_gradients, run_threads, slow_unless
from tests.support.schedule_cases import offloading

WORKSPACE = 8192
"""Upper limit for the temporary bytes of any unit's I."""

HALF, THREE_QUARTERS = 1 / 2, 3 / 4
"""Limits as fractions of 1F1B's peak."""

Change = Callable[[Any], Any]


def scheduled(name: str, units: Any, *, change: Change = lambda schedule: schedule, larger: float = 1.0) -> Any:
    """Units in equal runs under a schedule of `debubble.schedules`, with activations scaled by `larger`."""
    schedule = change(db.schedules[name](devices=4, micro_batches=8))
    count = len(units.units)
    bounds = [round(count * stage / schedule.stages) for stage in range(schedule.stages + 1)]
    ways = [(number, "none") for number in range(count)]
    partition = [ways[a:b] for a, b in pairwise(bounds)]
    costs = units.stage_costs(partition, schedule.placement)
    costs = costs.replace(activation=[larger * size for size in costs.activation])
    plan = plan_for("dapple", LLAMA8, units=units)
    return replace(plan, schedule=schedule, costs=costs, partition=units.planned(partition))


def planned(planner: str, units: Any, peak: Any, *, share: float, **options: Any) -> Any:
    return plan_for(planner, LLAMA8, units=units, limit=round(share * peak), effort=0.2, **options)


def with_share(schedule: Any) -> Any:
    return replace(offloading(schedule), offload_fraction=dict.fromkeys(range(4), 0.37))


def with_peers(schedule: Any) -> Any:
    return replace(offloading(schedule), peers={0: 3, 1: 2})


SCHEDULED = {
    "1f1b": partial(scheduled, "1f1b"),
    "gpipe": partial(scheduled, "gpipe"),
    "interleaved": partial(scheduled, "interleaved"),
    "zb-h1": partial(scheduled, "zb-h1"),
    "zb-v": partial(scheduled, "zb-v"),
    "offload": partial(scheduled, "1f1b", change=offloading),
    "offload of a share": partial(scheduled, "1f1b", change=with_share),
    "offload to peers": partial(scheduled, "1f1b", change=with_peers),
}
PLANNED = {
    "obscura": partial(planned, "obscura", share=HALF),
    "scope": partial(planned, "scope", share=HALF, chunks=2),
    "optpipe": partial(planned, "optpipe", share=THREE_QUARTERS),
    "adaoffload": partial(planned, "adaoffload", share=THREE_QUARTERS),
    "chronos": partial(planned, "chronos", share=THREE_QUARTERS, chunks=2),
}


@pytest.fixture(scope="module")
def expected(units: Any) -> Any:
    plan = scheduled("1f1b", units)
    return reference_gradients(plan.model, batch_for(plan), micro_batches=plan.micro_batches)


def ran(plan: Any) -> Any:
    """By rank: the arena after two steps, the counted peak, and the loss and gradients of the second step."""

    def one(pipeline: Any) -> Any:
        for _ in range(2):
            for parameter in pipeline.parameters():
                parameter.grad = None
            loss = pipeline.step(batch_for(plan))
        gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        return pipeline.measured.activations.arena, pipeline.measured.peak_activation, loss, gradients

    return run_threads(plan, one, arena=True)


def assert_runs_in_its_arena(plan: Any, expected: Any) -> None:
    for arena, peak, loss, gradients in ran(plan):
        assert arena.size == arena.plan.arena
        assert arena.workspace <= WORKSPACE
        assert peak <= arena.size + arena.workspace
        torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
        assert_gradients(gradients, expected[1])


@pytest.mark.parametrize("name", slow_unless(SCHEDULED, "zb-v", "offload of a share", "offload to peers"))
def test_a_schedule_runs_in_an_arena_of_its_size(name: str, units: Any, expected: Any) -> None:
    assert_runs_in_its_arena(SCHEDULED[name](units), expected)


@pytest.mark.parametrize("name", slow_unless(PLANNED, "obscura"))
def test_a_planners_plan_runs_in_an_arena_of_its_size(name: str, units: Any, peak_of_1f1b: Any, expected: Any) -> None:
    assert_runs_in_its_arena(PLANNED[name](units, peak_of_1f1b), expected)


def test_the_counted_peak_is_within_a_percent_of_the_arena(units: Any) -> None:
    for arena, peak, _, _ in ran(scheduled("gpipe", units)):
        assert 0.99 * arena.size <= peak <= arena.size


def test_full_reloads_use_their_planned_addresses(units: Any) -> None:
    for arena, *_ in ran(scheduled("1f1b", units, change=offloading)):
        reloads = sum(t.size for t in arena.plan.tensors if t.allocated_by.kind is Kind.L)
        assert 0.99 * reloads < arena.placed <= reloads


def test_activations_a_percent_larger_than_planned_are_refused(units: Any) -> None:
    plan = scheduled("1f1b", units, larger=0.99)
    with pytest.raises(ArenaError, match="bytes more of stage 0's sequence 0"):
        run_threads(plan, lambda pipeline: pipeline.step(batch_for(plan)), arena=True)


def test_second_plan_has_a_separate_arena(units: Any) -> None:
    first, second = scheduled("gpipe", units), scheduled("1f1b", units)

    def one(pipeline: Any) -> Any:
        pipeline.step(batch_for(first))
        before = pipeline.measured.activations.arena.size
        pipeline.switch_plan(second)
        pipeline.step(batch_for(second))
        return before, pipeline.measured.activations.arena.size

    sizes = [[plan.arena for plan in db.simulator.plan_addresses(p.simulate(), alignment=64)] for p in (first, second)]
    assert run_threads(first, one, arena=True) == [*zip(*sizes, strict=True)]


def test_updates_before_the_norm_are_refused_in_an_arena(units: Any) -> None:
    plan = scheduled("1f1b", units)
    with pytest.raises(db.InputError, match="An arena's addresses wait for backwards"):
        run_threads(plan, lambda pipeline: pipeline.post_validated_step(batch_for(plan)), arena=True)
