"""Pipelines on one device, with separate streams per rank, match plain autograd."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import DebubbleError, Kind, Op, StageCosts
from tests.support.cuda_cases import assert_same, on_gpu, on_threads, step_of
from tests.support.runtime_cases import plan_of, reference_gradients, tokens_of
from tests.support.schedule_cases import explicit, fused, offloading, schedule_of, tightest
from tests.support.tiny_models import GPT2, LLAMA, LLAMA_TIED, MIXTRAL

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "obscura", "pipeoffload", "bpipe", "chronos-recomp"]


def planned(name: Any, config: Any, *, devices: int = 2) -> Any:
    schedule = schedule_of(name, devices=devices, micro_batches=2 * devices)
    strategy = "full" if name in ("obscura", "chronos-recomp") else "none"
    return plan_of(schedule, config, strategy=strategy, costs=StageCosts.of(stages=schedule.stages, offload=1))


@pytest.mark.parametrize("lagging", [False, on_gpu(True)], ids=["prompt", "late"])
@pytest.mark.parametrize("name", [name if name in ("bpipe", "zb-v") else on_gpu(name) for name in SCHEDULES])
def test_step_has_the_gradients_of_one_process(device: Any, name: Any, lagging: bool) -> None:
    plan = planned(name, LLAMA_TIED if name in ("1f1b", "zb-v") else LLAMA, devices=4 if name == "bpipe" else 2)
    tokens = tokens_of(plan.model, rows=2 * plan.micro_batches)
    expected = reference_gradients(plan.model, tokens, device=device, micro_batches=plan.micro_batches)
    assert_same(step_of(plan, tokens, device, lagging=lagging), expected)


@pytest.mark.parametrize("config", [on_gpu(GPT2), MIXTRAL], ids=["gpt2", "mixtral"])
def test_other_families_have_the_gradients_of_one_process(device: Any, config: Any) -> None:
    plan = planned("zb-v", config)
    tokens = tokens_of(config, rows=plan.micro_batches)
    assert_same(
        step_of(plan, tokens, device),
        reference_gradients(config, tokens, device=device, micro_batches=plan.micro_batches),
    )


@pytest.mark.parametrize("share", [on_gpu(1.0), 0.5])
@pytest.mark.parametrize("form", [on_gpu(fused), explicit])
def test_the_tightest_limit_changes_no_gradient(device: Any, form: Any, share: float) -> None:
    schedule = offloading(form(schedule_of("1f1b", devices=2)))
    schedule = replace(schedule, offload_fraction=dict.fromkeys(range(schedule.stages), share))
    costs = StageCosts.of(stages=schedule.stages, activation=2, activation_recomputed=1, offload=1)
    plan = plan_of(schedule, LLAMA, strategy="norm+activation+multiply", costs=tightest(schedule, costs))
    tokens = tokens_of(LLAMA, rows=4)
    assert_same(
        step_of(plan, tokens, device, lagging=True), reference_gradients(LLAMA, tokens, device=device, micro_batches=4)
    )


@pytest.mark.parametrize("peers", [on_gpu({}), {0: 1}], ids=["host", "peer"])
def test_an_offloading_run_waits_for_its_addresses(device: Any, peers: Any) -> None:
    schedule = replace(offloading(schedule_of("1f1b", devices=2)), peers=peers)
    costs = StageCosts.of(stages=schedule.stages, activation=2**20, offload=1)
    plan = plan_of(schedule, LLAMA, costs=costs)
    tokens = tokens_of(LLAMA, rows=4)
    assert_same(
        step_of(plan, tokens, device, lagging=True, arena=True),
        reference_gradients(LLAMA, tokens, device=device, micro_batches=4),
    )


@pytest.mark.parametrize("zero", [on_gpu(0), 1])
def test_replicas_on_one_device_sum_their_gradients(device: Any, zero: int) -> None:
    plan = plan_of(schedule_of("1f1b", devices=2), LLAMA, data=2, zero=zero)
    tokens = tokens_of(LLAMA, rows=8)

    def train(pipeline: Any) -> Any:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        pipeline.step(tokens.chunk(pipeline.plan.options.data)[pipeline.ranks.replica])
        optimizer.step()
        return pipeline.state_dict()

    undivided = replace(plan, options=replace(plan.options, data=1, zero=0))
    alone, actual = (
        {name: tensor for state in on_threads(planned, train, device) for name, tensor in state.items()}
        for planned in (undivided, plan)
    )
    for name, parameter in actual.items():
        torch.testing.assert_close(parameter, alone[name], rtol=1e-10, atol=1e-12)


@pytest.mark.cuda
def test_threads_with_blocking_gpu_backwards_are_refused(gpu: Any) -> None:
    plan = plan_of(schedule_of("1f1b", devices=2), LLAMA, data=2, zero=2)
    rows = tokens_of(LLAMA, rows=8).chunk(2)
    with pytest.raises(DebubbleError, match=r"(run them as processes|Rank . has stopped)"):
        on_threads(plan, lambda pipeline: pipeline.step(rows[pipeline.ranks.replica]), gpu)


def stepping_inside(where: Any) -> Any:
    """Plans that step stages inside the step: after replicas sum their gradients, or on the host."""
    if where == "device":
        schedule = db.schedules["chronos-zero2"](devices=2, micro_batches=4, group=2)
        return plan_of(schedule, LLAMA, strategy="full", data=2, zero=2)
    schedule = schedule_of("interleaved", devices=2)
    orders = [
        [*order, *(Op(kind, s, 0) for kind in (Kind.D, Kind.S, Kind.P))] for s, order in enumerate(schedule.orders)
    ]
    return plan_of(replace(schedule, orders=tuple(map(tuple, orders))), LLAMA)


@pytest.mark.parametrize("where", [on_gpu("device"), "host"])
def test_steps_inside_the_step_train_as_on_the_cpu(device: Any, where: str) -> None:
    plan = stepping_inside(where)

    def train(pipeline: Any) -> Any:
        rows = tokens_of(LLAMA, rows=8).chunk(plan.options.data)[pipeline.ranks.replica]
        losses = []
        for _ in range(4):
            losses.append(float(pipeline.step(rows)))
            pipeline.optimizer_step()
        return losses

    make = partial(torch.optim.AdamW, lr=1e-2)
    actual = on_threads(plan, train, device, optimizer=make)
    expected = on_threads(plan, train, torch.device("cpu"), optimizer=make)
    actual, expected = (torch.tensor(losses, dtype=torch.float64) for losses in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)  # losses are summed in fp32
    assert actual[0][-1] < actual[0][0]


def test_trace_has_all_lanes_in_order_on_one_clock(device: Any) -> None:
    schedule = offloading(schedule_of("1f1b", devices=1))
    plan = plan_of(schedule, LLAMA, costs=StageCosts.of(stages=1, offload=1))

    def one(pipeline: Any) -> Any:
        pipeline.step(tokens_of(LLAMA, rows=4))
        return pipeline.measured.trace().steps[0]

    [step] = on_threads(plan, one, device)
    by_lane: dict[Any, Any] = {}
    for event in step.events:
        assert event.start <= event.end
        by_lane.setdefault(event.lane, []).append(event)
    assert {lane.value for lane in by_lane} == {"compute", "d2h", "h2d"}
    for events in by_lane.values():
        ordered = sorted(events, key=lambda event: event.start)
        assert all(a.end <= b.start + 1e-5 for a, b in itertools.pairwise(ordered))
    ends, starts = ({e.name: getattr(e, moment) for e in step.events} for moment in ("end", "start"))
    for j in range(plan.micro_batches):
        assert ends[f"0F{j}"] <= starts[f"0O{j}"] + 1e-5
        assert ends[f"0L{j}"] <= starts[f"0B{j}"] + 1e-5
