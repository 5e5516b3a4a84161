"""ZeRO shards parameters by rows: optimizers that need full parameters are refused with it, and correct without."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import debubble as db
from debubble.costs import model_units
from debubble.costs.partition import partition_named
from debubble.ir import InputError, RunOptions
from debubble.runtime.distributed.data_parallel import check_before_steps
from debubble.runtime.distributed.thread_transport import ThreadTransport
from tests.support.runtime_cases import plan_of, run_threads, tokens_of, train
from tests.support.tiny_models import LLAMA

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


class Sign(Optimizer):
    """An optimizer of an unknown class."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 1e-3 * parameter.grad.sign()


class CustomAdamW(AdamW):
    """A user's subclass of AdamW."""


def muon(parameters: Any) -> Any:
    return Muon([p for p in parameters if p.dim() == 2], lr=0.02)


def plan(*, data: Any, zero: Any) -> Any:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4 // data)
    return plan_of(schedule, LLAMA, dtype="fp32", data=data, zero=zero)


def losses(plan: Any, make: Any) -> Any:
    """Losses of three steps whose batches do not depend on the number of replicas."""
    batches = [tokens_of(LLAMA, rows=4, seed=step) for step in range(3)]
    return run_threads(plan, lambda pipeline: train(pipeline, batches), optimizer=make)[0]


def test_full_parameter_optimizers_are_correct_without_zero() -> None:
    # torch's Muon iterates in bf16, which amplifies the rounding of sums in another order.
    assert losses(plan(data=2, zero=0), muon) == pytest.approx(losses(plan(data=1, zero=0), muon), rel=3e-4)


@pytest.mark.parametrize("make", [muon, partial(Adafactor, lr=0.02)])
def test_full_parameter_optimizers_are_refused_with_zero(make: Any) -> None:
    with pytest.raises(InputError, match=r"(Muon|Adafactor) needs whole parameters, .*: plan with --zero 0"):
        losses(plan(data=2, zero=1), make)


def test_unsupported_optimizer_is_refused_before_its_first_step() -> None:
    def one(pipeline: Any) -> None:
        optimizer = muon(pipeline.parameters())
        pipeline.step(tokens_of(LLAMA, rows=2, seed=pipeline.ranks.replica))
        before = [p.detach().clone() for p in pipeline.parameters()]
        with pytest.raises(InputError, match="Muon needs whole parameters"):
            optimizer.step()
        assert all(torch.equal(p, b) for p, b in zip(pipeline.parameters(), before, strict=True))

    run_threads(plan(data=2, zero=1), one)


@pytest.mark.parametrize("make", [partial(SGD, lr=1e-2), partial(CustomAdamW, lr=1e-2)])
def test_elementwise_optimizers_step_shards_correctly(make: Any) -> None:
    assert losses(plan(data=2, zero=1), make) == pytest.approx(losses(plan(data=1, zero=0), make), rel=1e-5)


def test_unknown_optimizer_class_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="Sign is right only if it treats every element by itself"):
        losses(plan(data=2, zero=1), Sign)


@pytest.mark.parametrize(("zero", "times"), [(1, 1), (2, 2)])
def test_zero_2_sums_matrices_after_every_micro_batch(zero: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank keeps full gradients, only the rows that its optimizer steps."""
    rows: list[int] = []
    reduce = ThreadTransport.reduce

    def counting(transport: ThreadTransport, tensor: torch.Tensor, ranks: tuple[int, ...], *, to: int) -> None:
        if transport.rank == to:
            rows.append(tensor.numel())
        reduce(transport, tensor, ranks, to=to)

    monkeypatch.setattr(ThreadTransport, "reduce", counting)

    def one(pipeline: Any) -> int:
        pipeline.step(tokens_of(LLAMA, rows=2, seed=pipeline.ranks.replica))
        gradients = [p.grad for p in pipeline.parameters() if p.grad is not None]
        return sum(g.numel() * (times if g.dim() > 1 else 1) for g in gradients)

    expected = sum(run_threads(plan(data=2, zero=zero), one))
    assert sum(rows) == expected


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_counted_peak_matches_the_prediction(zero: int) -> None:
    """Within 0.5%, without the workspace of operators."""
    degrees: dict[str, Any] = {"dtype": "fp32", "sequence_length": 64, "data": 2, "zero": zero}
    model, cluster = db.Model.from_hf(CONFIG), db.Cluster.parse("4xCPU")
    planned = db.plan(model, cluster, planner="dapple", micro_batches=2, **degrees)
    units = model_units(model, cluster, RunOptions(**degrees), pipeline=2)
    units = replace(units, units=tuple(replace(unit, workspace=0) for unit in units.units))
    costs = units.stage_costs(partition_named(planned.partition, units), planned.schedule.placement)
    predicted = db.simulate(planned.schedule, costs).peak_memory

    def one(pipeline: Any) -> None:
        tokens = torch.randint(512, (2, 65), generator=torch.Generator().manual_seed(pipeline.ranks.replica))
        for _ in range(2):
            pipeline.step(tokens)
            pipeline.optimizer_step()
        pipeline.step(tokens)
        assert pipeline.measured.peak_memory == pytest.approx(float(predicted[pipeline.device]), rel=5e-3)

    run_threads(planned, one, optimizer=AdamW)


def test_pipeline_may_be_created_during_an_optimizer_step() -> None:
    parameter, owner = torch.nn.Parameter(torch.ones(2)), torch.nn.Identity()
    parameter.grad = torch.ones(2)
    made = register_optimizer_step_pre_hook(lambda *_: check_before_steps(owner, [parameter]))
    handle = register_optimizer_step_pre_hook(lambda *_: None)

    SGD([parameter], lr=0.5).step()

    made.remove()
    handle.remove()
    assert parameter.tolist() == [0.5, 0.5]
