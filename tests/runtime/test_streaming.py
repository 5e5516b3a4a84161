"""Transfers stream by unit: units leave after their forward, and a backward waits for one unit's reload at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import Moment, StageCosts
from debubble.models import ModelConfig
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.stage import Stage
from debubble.runtime.models.units import MicroBatch
from tests.support.runtime_cases import assert_same_gradients, plan_of, tokens_of
from tests.support.schedule_cases import explicit, fused, offloading
from tests.support.tiny_models import LLAMA

UNITS = ModelConfig.from_hf(LLAMA).units[1:-1]
X = (2, 16, LLAMA["hidden_size"])


def new_stage() -> Stage:
    built, ledger = build_stage(LLAMA, UNITS, dtype=torch.float64), Ledger()
    ledger.exclude(p for unit in built for p in unit.parameters())
    return Stage(built, UNITS, ledger)


def in_memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Waits:
    """Fake marks of a lane that record which units another lane has waited for."""

    def __init__(self) -> None:
        self.marked = 0
        self.waited: list[int] = []

    def __call__(self) -> Callable[[], None]:
        number, self.marked = self.marked, self.marked + 1
        return lambda: self.waited.append(number)


def offloaded_stage() -> tuple[Stage, torch.Tensor, torch.Tensor]:
    """A stage with offloaded activations, their buffer, and the forward's result."""
    stage = new_stage()
    y = stage.forward(0, torch.randn(X, dtype=torch.float64), MicroBatch(), unit_done=Waits())
    buffer = stage.offload(0, 1.0, in_memory)
    stage.release(0)
    return stage, buffer, y


def parameters_of(stage: Stage) -> list[Any]:
    return [parameter for unit in stage.units for parameter in unit.parameters()]


def test_offload_waits_only_for_its_units() -> None:
    stage, waits = new_stage(), Waits()
    stage.forward(0, torch.randn(X, dtype=torch.float64), MicroBatch(), unit_done=waits)
    assert waits.marked == len(UNITS)
    stage.offload(0, 0.25, in_memory)
    stage.release(0)
    assert waits.waited == [*range(len(waits.waited))]
    assert 0 < len(waits.waited) < len(UNITS)


def test_reload_does_not_hold_units_freed_by_backward() -> None:
    (stage, buffer, _), bytes_at_end = offloaded_stage(), list[int]()
    ledger = stage._ledger

    def unit_done() -> Callable[[], None]:
        stage.forget()
        bytes_at_end.append(ledger.bytes)
        return lambda: None

    stage.reload(0, buffer, unit_done=unit_done)
    assert bytes_at_end == [0] * len(UNITS)


@pytest.mark.parametrize("to_recompute", [False, True])
def test_reload_returns_tensors_in_order_of_need(to_recompute: bool) -> None:
    stage, buffer, _ = offloaded_stage()
    moved, brought = [[saved for saved, _ in unit] for unit in stage._states[0].moved.values()], []
    assert not any(saved.on_device for unit in moved for saved in unit)

    def unit_done() -> Callable[[], None]:
        brought.append([all(saved.on_device for saved in unit) for unit in moved])
        return lambda: None

    stage.reload(0, buffer, to_recompute=to_recompute, unit_done=unit_done)
    count, order = len(moved), 1 if to_recompute else -1
    assert brought == [([True] * n + [False] * (count - n))[::order] for n in range(1, count + 1)]


def test_backward_waits_for_one_reloaded_unit_at_a_time() -> None:
    plain, moved = new_stage(), new_stage()
    x = torch.randn(X, dtype=torch.float64)
    y = plain.forward(0, x, MicroBatch())
    first_is_back, last_has_run = threading.Event(), threading.Event()
    expected, actual, last = parameters_of(plain), parameters_of(moved), moved.units[-1]

    def watched(y: torch.Tensor, *context: Any) -> Any:
        y.register_hook(lambda _: last_has_run.set())
        return last(y, *context)

    moved.units[-1] = watched  # type: ignore[call-overload]
    moved.forward(0, x, MicroBatch(), unit_done=Waits())
    buffer = moved.offload(0, 1.0, in_memory)
    moved.release(0)

    def unit_done() -> Callable[[], None]:
        if first_is_back.is_set():
            # Earlier units are reloaded only after the unit's backward.
            assert last_has_run.wait(60)
        first_is_back.set()
        return lambda: None

    with ThreadPoolExecutor(1) as lane:
        reload = lane.submit(moved.reload, 0, buffer, unit_done=unit_done)
        assert first_is_back.wait(60)
        assert torch.equal(plain.backward(0, y, split=False), moved.backward(0, y, split=False))  # type: ignore[arg-type]
        reload.result()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(expected, actual, strict=True))


def test_backward_raises_the_error_of_its_reload() -> None:
    stage, buffer, y = offloaded_stage()

    def unit_done() -> Callable[[], None]:
        raise RuntimeError("the link is gone")

    with pytest.raises(RuntimeError, match="the link is gone"):
        stage.reload(0, buffer, unit_done=unit_done)
    with pytest.raises(RuntimeError, match="the link is gone"):
        stage.backward(0, torch.ones_like(y), split=False)


def test_offload_raises_the_error_of_its_forward() -> None:
    stage = new_stage()

    def unit_done() -> Callable[[], None]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        stage.forward(0, torch.randn(X, dtype=torch.float64), MicroBatch(), unit_done=unit_done)
    with pytest.raises(RuntimeError, match="out of memory"):
        stage.offload(0, 1.0, in_memory)


@pytest.mark.parametrize("recompute", [lambda schedule: schedule, fused, explicit])
def test_a_program_that_streams_has_the_same_gradients(recompute: Any) -> None:
    schedule = recompute(offloading(db.schedules["zb-h1"](devices=2, micro_batches=4)))
    schedule = replace(schedule, offload_fraction={0: 0.3})
    costs = StageCosts.of(stages=2, offload=1, offload_overlap=0.5, reload_overlap=0.5, recompute_overlap=0.5)
    moments = {w.moment for i in db.lower(schedule, costs).instructions for w in i.waits}
    assert Moment.STREAM in moments
    strategy = "none" if recompute not in (fused, explicit) else "full"
    assert_same_gradients(plan_of(schedule, LLAMA, strategy=strategy, costs=costs), LLAMA, tokens_of(LLAMA, rows=4))
