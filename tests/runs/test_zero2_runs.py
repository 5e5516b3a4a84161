"""DP 2 x PP 2 with ChronosPipe's ZeRO-2 variant: losses of one process, half the gradients and optimizer states."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import Kind
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from tests.runtime.test_pipeline import ADAMW, host_stepped, reference_losses, schedule_1f1b
from tests.support import gloo_ranks
from tests.support.run_cases import LLAMA8, kinds_of, plan_for, units_of
from tests.support.runtime_cases import plan_of, run_threads, tokens_of
from tests.support.tiny_models import LLAMA_TIED

EVEN = {**LLAMA8, "vocab_size": 62}
"""A model whose rows two replicas share evenly."""

STEPS = 2


def plan_with(config: Any, *, zero: Any, dtype: str = "fp32", group: int = 2) -> Any:
    schedule = db.schedules["chronos-zero2"](devices=2, micro_batches=4, group=group)
    return plan_of(schedule, config, data=2, zero=zero, dtype=dtype)


def train(plan: Any, *, transport: Any) -> Any:
    """Losses; bytes of gradients and of optimizer states in the last step; the final parameters."""
    pipeline = Pipeline(None, plan, transport=transport, optimizer=ADAMW)
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(plan.model, rows=2 * plan.micro_batches, seed=step)
        losses.append(float(pipeline.step(tokens.chunk(2)[pipeline.ranks.replica])))
        gradients = sum(p.grad.nbytes for p in pipeline.parameters() if p.grad is not None)
        pipeline.optimizer_step()
    states = [s for o in pipeline.optimizers for state in o.state.values() for s in state.values()]
    return losses, gradients, sum(s.nbytes for s in states if s.dim()), pipeline.state_dict()


def on_threads(plan: Any) -> Any:
    return ThreadTransport.run(4, lambda transport: train(plan, transport=transport))


@pytest.fixture(scope="module")
def divided() -> Any:
    return on_threads(plan_with(EVEN, zero=2))


@pytest.mark.slow
def test_the_planner_reduces_gradients_inside_the_step() -> None:
    units = units_of(LLAMA8, dtype=torch.float32)
    reducing = replace(units, stage_entries={"gradient_reduce": 1e-3})
    plan = plan_for(
        "chronos", LLAMA8, units=reducing, devices=2, micro_batches=4, chunks=2, data=2, zero=2, dtype="fp32"
    )
    assert Kind.G in kinds_of(plan)
    expected = reference_losses(LLAMA8, micro_batches=8, steps=STEPS)
    for losses, *_ in on_threads(plan):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_plan_losses_match_one_process(divided: Any) -> None:
    expected = reference_losses(EVEN, micro_batches=8, steps=STEPS)
    for losses, *_ in divided:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_gradients_and_optimizer_states_are_halved(divided: Any) -> None:
    undivided = on_threads(plan_with(EVEN, zero=0))
    for (_, gradients, states, _), (_, all_gradients, all_states, _) in zip(divided, undivided, strict=True):
        assert gradients * 2 == all_gradients > 0
        assert states * 2 == all_states > 0


def test_sharding_changes_no_bit() -> None:
    """The table of 61 rows has no even halves and is tied over two devices."""
    undivided, divided = (on_threads(plan_with(LLAMA_TIED, zero=zero, dtype="bf16")) for zero in (0, 2))
    for (losses, _, _, state), (expected, _, _, parameters) in zip(divided, undivided, strict=True):
        assert losses == expected
        assert state.keys() == parameters.keys()
        assert all(torch.equal(state[name], parameters[name]) for name in state)


@pytest.mark.slow
def test_sharded_states_may_be_on_hosts() -> None:
    plans = [plan_of(host_stepped(schedule_1f1b()), EVEN, data=2, zero=zero, dtype="fp32") for zero in (0, 2)]
    (undivided, *_), (divided, *_) = (on_threads(plan) for plan in plans)
    assert divided[0] == pytest.approx(undivided[0], rel=1e-6)  # replicas are summed before micro-batches
    assert divided[2] * 2 == undivided[2]


def test_checkpoint_of_sharded_states_has_full_parameters(tmp_path: Path) -> None:
    def save(pipeline: Any) -> Any:
        pipeline.step(tokens_of(EVEN, rows=4))
        pipeline.optimizer_step()
        pipeline.save_pretrained(tmp_path)
        return pipeline.state_dict()

    def load(pipeline: Any) -> Any:
        pipeline.load_pretrained(tmp_path)
        return pipeline.state_dict()

    plan = plan_with(EVEN, zero=2)
    saving, loading = run_threads(plan, save, optimizer=ADAMW), run_threads(plan, load, seed=1)
    for saved, loaded in zip(saving, loading, strict=True):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def over_gloo(rank: Any, folder: Any, path: Any) -> None:
    torch.save(train(Plan.load(path), transport=None)[:3], folder / f"rank{rank}.pt")


@pytest.mark.slow
def test_the_plan_runs_over_gloo(tmp_path: Path, divided: Any) -> None:
    plan_with(EVEN, zero=2).save(tmp_path / "plan.json")
    answers = gloo_ranks.spawn(4, over_gloo, tmp_path / "plan.json")
    for rank, (losses, gradients, states, _) in enumerate(divided):
        actual = torch.load(answers / f"rank{rank}.pt")
        assert actual[0] == pytest.approx(losses, rel=1e-6)
        assert actual[1:] == (gradients, states)
