"""One device of a plan, run alone with the recorded messages of its peers, behaves as in the full pipeline."""

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch
from on_gpu.single_rank import SingleRankTransport

import debubble as db
from debubble.ir import InputError, Op, StageCosts, lower
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from tests.support.runtime_cases import loss_and_gradients, plan_of, tokens_of
from tests.support.schedule_cases import explicit, fused, offloading, schedule_of, tightest
from tests.support.tiny_models import LLAMA


class Recording(ThreadTransport):
    """Records every message that its rank receives."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport._hub, transport.rank)
        self.received: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def receive(self, buffer: Any, source: Any, channel: Any) -> Any:
        tensor = super().receive(buffer, source, channel)
        self.received[source].append(tensor.clone())
        return tensor


def measured(pipeline: Any, tokens: Any) -> Any:
    """Gradients and peak activations of one step."""
    return loss_and_gradients(pipeline, tokens)[1], pipeline.measured.peak_activation


def together(plan: Any, tokens: Any) -> Any:
    """Measurements of every device in the full pipeline, with its messages."""

    def one(transport: Any) -> Any:
        recording = Recording(transport)
        return *measured(Pipeline(None, plan, transport=recording), tokens), recording.received

    return ThreadTransport.run(plan.devices, one)


def replay(program: Any, device: Any, received: Any) -> Any:
    """A supply that replays received messages."""
    waiting = {source: iter(messages) for source, messages in received.items()}
    peer_of = {i.op: i.peer for i in program.instructions if i.device == device}

    def supply(op: Any, buffer: Any) -> None:
        buffer.copy_(next(waiting[peer_of[op]]))

    return supply


def limited(schedule: Any) -> Any:
    """A plan that offloads as much as possible under the tightest limit."""
    costs = StageCosts.of(stages=schedule.stages, activation=2, activation_recomputed=1, offload=1)
    schedule = offloading(schedule)
    return plan_of(schedule, LLAMA, costs=tightest(schedule, costs))


@cache
def plans() -> Any:
    return {
        "1f1b": plan_of(schedule_of("1f1b", devices=4), LLAMA),
        "zb-v": plan_of(schedule_of("zb-v", devices=4, micro_batches=8), LLAMA),
        "recomputed": plan_of(explicit(fused(schedule_of("zb-h1", devices=2))), LLAMA, strategy="full"),
        "offloaded": limited(schedule_of("1f1b", devices=2)),
    }


@pytest.mark.parametrize("name", ["zb-v", "recomputed", "offloaded"])
def test_single_rank_matches_pipeline_gradients_and_peak(name: str) -> None:
    plan = plans()[name]
    tokens, program = tokens_of(plan.model, rows=8), lower(plan.schedule, plan.costs)
    for device, (expected, peak, received) in enumerate(together(plan, tokens)):
        alone = SingleRankTransport(program, device, replay(program, device, received))
        gradients, peak_alone = measured(Pipeline(None, plan, transport=alone), tokens)
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[n], expected[n]) for n in expected)
        if name != "offloaded":  # there, lanes race for the peak
            assert peak_alone == peak
        else:
            assert peak_alone > 0


def zero(op: Op, buffer: torch.Tensor) -> None:
    """A message of zeros."""
    buffer.zero_()


def test_message_is_not_received_before_it_arrives() -> None:
    plan = plans()["1f1b"]
    arrivals = {Op.parse("1RECV_F0"): 0.2}
    alone = SingleRankTransport(lower(plan.schedule, plan.costs), 1, zero, arrivals=arrivals)
    pipeline = Pipeline(None, plan, transport=alone)
    pipeline.step(tokens_of(plan.model, rows=4))
    (step,) = pipeline.measured.trace().steps
    [received] = [event.end for event in step.events if event.name == "1RECV_F0"]
    assert received >= 0.2


def test_device_that_offloads_to_a_peer_cannot_run_alone() -> None:
    schedule = db.schedules["bpipe"](devices=4, micro_batches=8)
    plan = plan_of(schedule, LLAMA)
    with pytest.raises(InputError, match="cannot run alone"):
        SingleRankTransport(lower(schedule, plan.costs), 0, lambda op, buffer: None)
