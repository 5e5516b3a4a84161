"""ZeRO leaves a replica rows of parameters: who needs whole ones is refused, and right without it."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads
from tests.support.runtime_cases import LLAMA, plan_of, tokens_of


class Sign(Optimizer):
    """Of a class that nothing is known of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 1e-3 * parameter.grad.sign()


class Own(AdamW):
    """A user's own AdamW."""


def muon(parameters: Any) -> Any:
    return Muon([p for p in parameters if p.dim() == 2], lr=0.02)


def plan(*, data: Any, zero: Any) -> Any:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4 // data)
    return plan_of(schedule, LLAMA, dtype="fp32", data=data, zero=zero)


def losses(plan: Any, make: Any) -> Any:
    """Of four steps, whose batches do not depend on the number of replicas."""

    def one(transport: Any) -> Any:
        pipeline = Pipeline(None, plan, transport=transport, optimizer=make)
        found = []
        for step in range(4):
            own = tokens_of(LLAMA, rows=4, seed=step).chunk(plan.options.data)[pipeline.ranks.replica]
            found.append(float(pipeline.step(own)))
            pipeline.optimizer_step()
        return found

    return Threads.run(plan.ranks, one)[0]


@pytest.mark.parametrize("make", [muon, partial(Adafactor, lr=0.02)])
def test_optimizers_of_whole_parameters_are_right_without_zero_and_refused_with_it(make: Any) -> None:
    assert losses(plan(data=2, zero=0), make) == pytest.approx(losses(plan(data=1, zero=0), make), rel=1e-4)
    with pytest.raises(InputError, match=r"(Muon|Adafactor) needs whole parameters, .*: plan with --zero 0"):
        losses(plan(data=2, zero=1), make)


def test_an_optimizer_that_the_user_makes_is_refused_before_its_first_step() -> None:
    def one(transport: Any) -> None:
        pipeline = Pipeline(None, plan(data=2, zero=1), transport=transport)
        optimizer = muon(pipeline.parameters())
        pipeline.step(tokens_of(LLAMA, rows=2, seed=pipeline.ranks.replica))
        before = [p.detach().clone() for p in pipeline.parameters()]
        with pytest.raises(InputError, match="Muon needs whole parameters"):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(pipeline.parameters(), before, strict=True))

    Threads.run(4, one)


@pytest.mark.parametrize("make", [partial(AdamW, lr=1e-2), partial(SGD, lr=1e-2), partial(Own, lr=1e-2)])
def test_optimizers_of_single_elements_step_rows_as_they_step_wholes(make: Any) -> None:
    assert losses(plan(data=2, zero=1), make) == pytest.approx(losses(plan(data=1, zero=0), make), rel=1e-5)


def test_of_a_class_that_nothing_is_known_of_there_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="Sign is right only if it treats every element by itself"):
        losses(plan(data=2, zero=1), Sign)


@pytest.mark.parametrize(("zero", "times"), [(1, 1), (2, 2)])
def test_zero_2_sums_matrices_after_every_micro_batch(zero: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no rank keeps whole gradients: it has the rows that the optimizer steps."""
    rows: list[int] = []
    reduce = Threads.reduce

    def counting(transport: Threads, tensor: torch.Tensor, ranks: tuple[int, ...], *, to: int) -> None:
        if transport.rank == to:
            rows.append(tensor.numel())
        reduce(transport, tensor, ranks, to=to)

    monkeypatch.setattr(Threads, "reduce", counting)

    def one(transport: Any) -> int:
        pipeline = Pipeline(None, plan(data=2, zero=zero), transport=transport)
        pipeline.step(tokens_of(LLAMA, rows=2, seed=pipeline.ranks.replica))
        gradients = [p.grad for p in pipeline.parameters() if p.grad is not None]
        return sum(g.numel() * (times if g.dim() > 1 else 1) for g in gradients)

    expected = sum(Threads.run(4, one))
    assert sum(rows) == expected


def test_losses_with_zero_2_are_those_of_zero_0_up_to_the_order_of_sums() -> None:
    assert losses(plan(data=2, zero=2), AdamW) == pytest.approx(losses(plan(data=2, zero=0), AdamW), rel=1e-6)
