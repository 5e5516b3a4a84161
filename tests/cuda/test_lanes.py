"""Lanes are streams that wait for each other's marks, share a clock, and are joined at the end of a step."""

from threading import Thread
from typing import Any

import pytest
import torch

from debubble.ir import Lane
from debubble.runtime.execution.lanes import lanes_of
from debubble.runtime.memory.streams import StreamHandoff
from tests.support.cuda_cases import lag, own_stream

SIZE = 1 << 16


def in_thread(work: Any) -> Any:
    """Return value of a function in another thread, which has another current stream."""
    answers = []
    thread = Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


def test_lane_that_waits_for_a_mark_sees_earlier_work(device: Any) -> None:
    lanes = lanes_of(device)
    value = torch.zeros(SIZE, device=device)

    def write() -> Any:
        with lanes.lane(Lane.H2D, None):
            lag(device)
            value.fill_(1)
            return lanes.mark()

    lanes.wait(in_thread(write), for_memory=False)
    assert (value + 1).eq(2).all()


def test_wait_for_memory_returns_when_the_device_arrives(device: Any) -> None:
    lanes = lanes_of(device)
    with lanes.lane(Lane.D2H, None):
        lag(device)
        mark = lanes.mark()
    lanes.wait(mark, for_memory=True)
    assert mark.event is None or mark.event.query()


def test_step_ends_after_the_work_of_all_lanes(device: Any) -> None:
    lanes = lanes_of(device)
    sums, guests = torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)
    lanes.start_step()

    def reduce() -> None:
        with lanes.lane(Lane.REDUCE, None):
            lag(device)
            sums.fill_(1)
        with lanes.service_stream(0):
            lag(device)
            guests.fill_(2)

    in_thread(reduce)
    lanes.end_step()
    assert (sums + guests).eq(3).all()


def test_a_lane_that_catches_up_has_nothing_before_it(device: Any) -> None:
    lanes = lanes_of(device)
    with lanes.lane(Lane.RECV, 1):
        lag(device)
        mark = lanes.mark()
        lanes.catch_up()
        assert mark.event is None or mark.event.query()


def test_marks_are_in_order_on_the_hosts_clock(device: Any) -> None:
    lanes = lanes_of(device)
    lanes.start_step()
    marks = []
    for _ in range(3):
        marks.append(lanes.mark())
        lag(device)
    assert (times := lanes.seconds(marks)) == sorted(times)
    with lanes.lane(Lane.D2H, None):
        lanes.wait(marks[-1], for_memory=False)
        later = lanes.mark()
    assert lanes.seconds([later])[0] >= times[-1]


def test_tensor_handed_between_threads_is_complete(device: Any) -> None:
    """The maker releases the tensor at once and overwrites the memory that it gets next."""

    def make() -> Any:
        with own_stream(device):
            lag(device)
            return StreamHandoff.from_current_stream(torch.full((SIZE,), 7.0, device=device))

    with own_stream(device):
        handed = in_thread(make)
        lag(device)
        copy = handed.receive().clone()
        del handed

        def write_over() -> Any:
            with own_stream(device):
                return [torch.full((SIZE,), -1.0, device=device) for _ in range(8)]

        in_thread(write_over)
        assert copy.eq(7).all()


@pytest.mark.cuda
def test_lanes_have_streams_and_compute_uses_the_callers(gpu: Any) -> None:
    lanes = lanes_of(torch.device("cuda"))
    assert lanes.device == gpu
    streams = []
    for lane, peer in [(Lane.COMPUTE, None), (Lane.D2H, None), (Lane.H2D, None), (Lane.SEND, 1), (Lane.SEND, 2)]:
        with lanes.lane(lane, peer):
            streams.append(torch.cuda.current_stream())
    assert streams[0] == torch.cuda.current_stream()
    assert len({stream.cuda_stream for stream in streams}) == len(streams)
    with lanes.lane(Lane.D2H, None):
        assert torch.cuda.current_stream() == streams[1]


@pytest.mark.cuda
def test_lanes_run_concurrently_with_compute(gpu: Any) -> None:
    lanes = lanes_of(gpu)
    lanes.start_step()
    lag(gpu)
    end = lanes.mark()
    with lanes.lane(Lane.D2H, None):
        start = lanes.mark()
    started, ended = lanes.seconds([start, end])
    assert started < ended
