"""Small models, and the comparison of a plan's step with one process, shared by the tests of the runtime."""

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from debubble.ir import RunOptions, StageCosts
from debubble.models import ModelConfig
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.stage import Stage
from debubble.runtime.steps.batch import BatchFormat, read_batch
from tests.support.model_cases import entries_of, on_cpus
from tests.support.reference_model import ReferenceModel
from tests.support.schedule_cases import recomputing
from tests.support.tiny_models import GPT2 as GPT2
from tests.support.tiny_models import LLAMA as LLAMA
from tests.support.tiny_models import LLAMA_TIED as LLAMA_TIED
from tests.support.tiny_models import MIXTRAL as MIXTRAL
from tests.support.tiny_models import with_layers as with_layers

CPU = torch.device("cpu")


def slow_unless(names: Iterable[str], *fast: str) -> list[Any]:
    """Test parameters of which all but a few run only in `make test-slow`."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


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
    """A plan for a schedule with the model's units in nearly equal runs, or with `counts` units per stage.

    Without `costs` its transfers stream.  With a strategy all backwards recompute, unless the schedule has its own
    recomputation.
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


def inner_stage(
    config: Any, strategy: str = "none", *, device: torch.device = CPU, dtype: torch.dtype = torch.float64
) -> tuple[Stage, Ledger]:
    """A stage of all units but the first and the last, and the ledger that counts it."""
    units = [replace(unit, strategy=strategy) for unit in ModelConfig.from_hf(config).units[1:-1]]
    built, ledger = build_stage(config, units, dtype=dtype), Ledger(device)
    for unit in built:
        unit.to(device).attach_ledger(ledger)
    return Stage(built, units, ledger), ledger


def tokens_of(config: Any, *, rows: Any, length: int = 12, seed: int = 0) -> Any:
    return torch.randint(
        0, entries_of(config)["vocab_size"], (rows, length + 1), generator=torch.Generator().manual_seed(seed)
    )


def masked_batch(config: Any, *, rows: int, length: int, packed: bool = False) -> dict[str, torch.Tensor]:
    """Rows whose first has ignored targets; if `packed`, all have two documents."""
    tokens = tokens_of(config, rows=rows, length=length)
    batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
    batch["targets"][0, 3:9] = -100
    if packed:
        batch["position_ids"] = torch.cat((torch.arange(5), torch.arange(length - 5))).expand(rows, -1)
    return batch


def run_threads(
    plan: Any, work: Any, *, model: Any = None, in_place: bool = False, ranks: Any = None, **arguments: Any
) -> Any:
    """`work(pipeline)` on every rank of a plan, on threads; the answers by rank.

    Every rank has a copy of the model, unless they all train it in place.
    """

    def one(transport: Any) -> Any:
        local_model = model if in_place else copy.deepcopy(model)
        return work(Pipeline(local_model, plan, transport=transport, **arguments))

    return ThreadTransport.run(ranks or plan.ranks, one)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """The current gradient of a parameter."""
    assert parameter.grad is not None
    return parameter.grad


def loss_and_gradients(pipeline: Any, batch: Any) -> Any:
    """Loss and the rank's gradients of one step, which changes nothing else."""
    loss = pipeline.step(batch)
    assert pipeline.measured.in_flight_bytes == 0
    return loss, {name: p.grad for name, p in pipeline.named_parameters()}


def gradients_of(plan: Any, tokens: Any, **arguments: Any) -> Any:
    """Loss, and the gradient of every parameter, of one step of the plan."""
    answers = run_threads(plan, partial(loss_and_gradients, batch=tokens), **arguments)
    return answers[0][0], {name: g for _, gradients in answers for name, g in gradients.items()}


def peaks_of(plan: Any, tokens: Any, **arguments: Any) -> list[int]:
    """Peak activations of each rank in one step."""
    return run_threads(plan, lambda p: (p.step(tokens), p.measured.peak_activation)[1], **arguments)  # type: ignore[no-any-return]


def loss_alone(model: Any, tokens: Any) -> Any:
    """Mean loss of a model in one process by plain autograd; gradients stay on the parameters."""
    answer = model(tokens[:, :-1])
    logits = getattr(answer, "logits", answer).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def gradients_alone(model: Any, tokens: Any) -> Any:
    """Loss and the gradient (or None) of every parameter of a model in one process, which keeps none of them."""
    loss = loss_alone(model, tokens)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return loss, gradients


def losses_alone(model: Any, optimizer: Any, batches: Iterable[Any], *, max_norm: float | None = None) -> list[float]:
    """Losses of a model in one process, with a step per batch."""
    losses = []
    for tokens in batches:
        losses.append(float(loss_alone(model, tokens)))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reference_gradients(
    config: Any, tokens: Any, *, micro_batches: Any, dtype: Any = torch.float64, device: Any = CPU
) -> Any:
    """Loss and gradients of the full model in one process: plain autograd, micro-batch by micro-batch."""
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
    """Compare loss and gradients of the plan's step with the reference, to a relative 1e-12."""
    loss, gradients = gradients_of(plan, tokens)
    expected_loss, expected = reference_gradients(config, tokens, micro_batches=plan.micro_batches)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert expected.keys() - gradients.keys() <= {"lm_head.weight"}
    assert_gradients(gradients, expected)


def assert_as_alone(plan: Plan, config: Any, batch: Any) -> None:
    """Compare every rank's loss, norm and parameter change (by SGD at rate 1) with one process.

    The batch is that of all replicas; their micro-batches together are those of one process.
    """

    def one(pipeline: Any) -> Any:
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        loss, norm = pipeline.step(rows_of(pipeline, batch)), pipeline.optimizer_step(float("inf"))
        return loss, norm, {name: before[name] - value for name, value in pipeline.state_dict().items()}

    expected_loss, expected = reference_gradients(config, batch, micro_batches=plan.micro_batches * plan.options.data)
    distinct = {id(gradient): gradient for gradient in expected.values()}.values()
    squares = sum(float(gradient.square().sum()) for gradient in distinct)
    for loss, norm, changes in run_threads(plan, one, optimizer=partial(torch.optim.SGD, lr=1.0)):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        assert norm is None or float(norm) == pytest.approx(squares**0.5, rel=1e-10)
        for name, change in changes.items():
            # The difference of parameters before and after the step is rounded.
            largest = max(1.0, float(expected[name].abs().max()))
            assert (change - expected[name]).abs().max() <= 1e-11 * largest, name


def rows_of(pipeline: Any, batch: Any) -> Any:
    """The replica's share of a batch of all replicas."""
    data, replica = pipeline.plan.options.data, pipeline.ranks.replica
    if isinstance(batch, dict):
        return {name: entry.chunk(data)[replica] for name, entry in batch.items()}
    return batch.chunk(data)[replica]


def train(pipeline: Any, batches: Iterable[Any], *, max_norm: float | None = None) -> list[float]:
    """Losses of a step per batch, of which a replica has its rows."""
    losses = []
    for batch in batches:
        losses.append(float(pipeline.step(rows_of(pipeline, batch))))
        pipeline.optimizer_step(max_norm)
    return losses


def assert_same_run(actual: Any, expected: Any) -> None:
    """Compare losses and parameters bitwise."""
    (losses, parameters), (expected_losses, expected_parameters) = actual, expected
    assert losses == expected_losses
    assert parameters.keys() == expected_parameters.keys()
    assert [name for name in parameters if not torch.equal(parameters[name], expected_parameters[name])] == []


def assert_gradients(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    relative: float = 1e-12,
    absolute: float = 0.0,
) -> None:
    """Compare gradients by name, with a tolerance relative to the largest entry of the expected one."""
    for name, gradient in actual.items():
        assert (gradient - expected[name]).abs().max() <= relative * expected[name].abs().max() + absolute, name
