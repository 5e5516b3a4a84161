"""Threads of lanes persist between steps and end with their pipeline."""

import gc
import threading
from functools import partial
from typing import Any

import pytest

import debubble as db
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from debubble.runtime.execution.lanes import LaneThread
from tests.support.runtime_cases import plan_of, tokens_of
from tests.support.tiny_models import LLAMA


def test_a_lanes_thread_works_in_order_and_ends_with_it() -> None:
    lane = LaneThread()
    seen: list[tuple[int, threading.Thread]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread()))

    for number in range(3):
        done = lane.start(partial(note, number))
    done.wait()
    assert [number for number, _ in seen] == [0, 1, 2]
    (thread,) = {thread for _, thread in seen}
    del lane
    gc.collect()
    thread.join()


def sending(plan: Any, steps: Any, *, fails: Any = ()) -> Any:
    """Threads on which rank 0 sends in each step; in some steps the message cannot be sent."""

    def one(transport: Any) -> Any:
        pipeline, send = Pipeline(None, plan, transport=transport), transport.send
        seen: list[set[threading.Thread]] = []

        def noted(*arguments: Any) -> None:
            seen[-1].add(threading.current_thread())
            if len(seen) - 1 in fails:
                raise ValueError("broken")
            send(*arguments)

        transport.send = noted
        for step in range(steps):
            seen.append(set())
            pipeline.step(tokens_of(LLAMA, rows=4, seed=step))
        return seen

    return ThreadTransport.run(2, one)[0]


PLAN = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)


def test_a_lane_has_the_same_thread_in_every_step() -> None:
    first, second, third = sending(PLAN, 3)
    assert len(first) == 1
    assert first == second == third


def test_a_step_that_fails_leaves_no_lane_waiting() -> None:
    with pytest.raises(ValueError, match="broken"):
        sending(PLAN, 2, fails=(1,))
