"""Lagging streams, which reveal missing waits, and one step on a device compared with plain autograd."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from tests.support.runtime_cases import assert_gradients, loss_and_gradients

CYCLES = 20_000_000
"""About ten milliseconds of a GPU."""


def on_gpu(value: Any) -> Any:
    """A test parameter that runs only on a GPU, as the CPU, where nothing waits, would show nothing more."""
    return pytest.param(value, marks=pytest.mark.cuda)


def lag(device: Any, cycles: Any = CYCLES) -> None:
    """Keep the current stream busy; on the CPU, where nothing is enqueued, there is nothing to lag."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


@contextmanager
def own_stream(device: Any) -> Iterator[Any]:
    """A separate stream for this thread's compute lane."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


class Lagging(ThreadTransport):
    """Ranks on threads whose messages are sent late."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport._hub, transport.rank)

    def send(self, tensor: Any, to: Any, channel: Any) -> None:
        lag(tensor.device, CYCLES // 10)
        super().send(tensor, to, channel)


def on_threads(plan: Any, work: Any, device: Any, *, lagging: bool = False, **arguments: Any) -> Any:
    """`work(pipeline)` on every rank, each with a separate compute stream of one device; the answers by rank."""

    def one(transport: Any) -> Any:
        with own_stream(device):
            transport = Lagging(transport) if lagging else transport
            answer = work(Pipeline(None, plan, transport=transport, device=device, **arguments))
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            return answer

    return ThreadTransport.run(plan.ranks, one)


def step_of(plan: Any, tokens: Any, device: Any, **arguments: Any) -> Any:
    """Loss and gradients of one step."""
    answers = on_threads(plan, partial(loss_and_gradients, batch=tokens), device, **arguments)
    return answers[0][0], {name: g for _, gradients in answers for name, g in gradients.items()}


def assert_same(actual: Any, expected: Any, *, tolerance: float = 1e-12) -> None:
    """Compare loss and gradients, relative to each tensor's largest entry."""
    (loss, gradients), (expected_loss, expected_gradients) = actual, expected
    torch.testing.assert_close(loss.cpu(), expected_loss.cpu(), rtol=tolerance, atol=0)
    assert expected_gradients.keys() - gradients.keys() <= {"lm_head.weight"}
    alongside = {name: expected_gradients[name].to(gradient.device) for name, gradient in gradients.items()}
    assert_gradients(gradients, alongside, relative=tolerance)
