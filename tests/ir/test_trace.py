from dataclasses import replace
from pathlib import Path

import pytest

from debubble.ir import InputError, Lane, MemorySample, Trace, TraceEvent, TraceStep
from debubble.ir.trace import TracePhase


def step(number: int, *, begin: float = 0.0, length: float = 1.0) -> TraceStep:
    return TraceStep(
        step=number,
        events=(
            TraceEvent("0F0", 0, Lane.COMPUTE, begin, begin + length / 2),
            TraceEvent("0B0", 0, Lane.COMPUTE, begin, begin + length),
        ),
        memory=(MemorySample(0, begin, 5.0),),
        phases=(
            TracePhase("reads data", 0, begin - 0.5, begin),
            TracePhase("updates parameters", 0, begin + length, begin + 2),
        ),
    )


def test_a_saved_trace_is_loaded_unchanged(tmp_path: Path) -> None:
    trace = Trace(devices=1, steps=(step(3), step(4, length=2.0)))
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace


def test_the_typical_step_has_the_median_makespan() -> None:
    trace = Trace(devices=1, steps=(step(0, length=9), step(1, length=2), step(2, length=3)))
    assert trace.typical.step == 2


def test_step_0_is_typical_only_if_it_is_the_only_one() -> None:
    """The first of steps of 2, 1 and 3 would be the median."""
    steps = step(0, length=2), step(1, length=1), step(2, length=3)
    assert Trace(devices=1, steps=steps).typical.step == 2
    assert [s.step for s in Trace(devices=1, steps=steps).warm] == [1, 2]
    assert Trace(devices=1, steps=steps[:1]).typical.step == 0


def test_a_step_lasts_from_the_first_phase_to_the_last() -> None:
    assert (step(0).makespan, step(0).seconds) == (1.0, 2.5)


def test_traces_of_two_devices_are_joined_from_time_zero() -> None:
    first = Trace(devices=2, steps=(step(7, begin=10.0),))
    event = TraceEvent("1F0", 1, Lane.COMPUTE, 11.0, 12.0)
    second = Trace(devices=2, steps=(TraceStep(step=7, events=(event,)),))
    joined = Trace.join([first, second])
    events = (*step(7).events, event._replace(start=1.0, end=2.0))
    assert joined.steps == (replace(step(7), events=events),)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}", "is not a debubble trace: it has no entry 'debubble_trace'."),
        ('{"debubble_trace": 99}', "has trace version 99; this debubble reads version 1"),
        ('{"debubble_trace": 1, "devices": 1, "steps": [', "is not a whole trace file"),
        ('{"debubble_trace": 1, "devices": 1, "steps": []}', "holds no measured step"),
        (
            '{"debubble_trace":1,"devices":1,"steps":[{"step":0,"events":[["0F0",1,"compute",0,1]]}]}',
            "events of device 1, but says it has 1 devices",
        ),
        (
            '{"debubble_trace":1,"devices":1,"steps":[{"step":0,"events":[["0F0",0,"compute",2,1]]}]}',
            "0F0 end before it starts",
        ),
        (
            '{"debubble_trace":1,"devices":1,"steps":[{"step":0,"events":[["0X0",0,"compute",0,1]]}]}',
            "'0X0' is not an operation",
        ),
    ],
)
def test_an_invalid_trace_file_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        Trace.load(path)
    assert sentence in str(caught.value)


def test_a_missing_trace_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.json cannot be read"):
        Trace.load(tmp_path / "nothing.json")
