import itertools
from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import Lane, Moment, PlannedUnit, Trace
from debubble.runtime.distributed.thread_transport import ThreadTransport
from debubble.training.monitoring.report import compare_timelines
from debubble.training.rehearsal import rehearse, scaled
from tests.support.schedule_cases import offloading, on_one_link


def abstract_plan(name: str, *, devices: int, chunks: int = 1, **costs: Any) -> db.Plan:
    """Times of a few milliseconds."""
    stages = devices * chunks
    stage_costs = db.StageCosts.of(stages=stages, forward=0.001, backward_input=0.001, backward_weight=0.001, **costs)
    options = {"chunks": chunks} if chunks > 1 else {}
    return db.Plan(
        planner="test",
        schedule=db.schedules[name](devices=devices, micro_batches=4, costs=stage_costs, **options),
        costs=stage_costs,
        lower_bound=0,
        partition=tuple((PlannedUnit("stage", s),) for s in range(stages)),
    )


def rehearsed(plan: db.Plan, steps: int = 1) -> Trace:
    traces: list[Trace] = ThreadTransport.run(
        plan.devices, lambda transport: rehearse(plan, steps=steps, transport=transport)
    )
    return traces[0]


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("1f1b", {}),
        ("interleaved", {"chunks": 2}),
        ("1f1b", {"communication": 0.001, "communication_model": "blocking"}),
        ("pipeoffload", {"offload": 0.001, "offload_overlap": 0.5, "reload_overlap": 0.5, "chunks": 2}),
    ],
)
def test_every_operation_happens_and_takes_its_time(name: str, entries: Any) -> None:
    plan = abstract_plan(name, devices=2, **entries)
    program = plan.simulate().program
    events = {event.name: event for event in rehearsed(plan).typical.events}
    assert events.keys() == {instruction.op.name for instruction in program.instructions}
    for instruction in program.instructions:
        if instruction.lane is Lane.COMPUTE and instruction.peer is None:
            event = events[instruction.op.name]
            assert event.end - event.start >= instruction.duration
        for wait in instruction.waits:
            if wait.moment is Moment.STREAM:
                streamed = program.instructions[wait.instruction]
                earliest = events[streamed.op.name].start + streamed.duration - instruction.lead
                assert events[instruction.op.name].start >= earliest


@pytest.mark.parametrize("host_link", ["full-duplex", "half-duplex"])
def test_transfers_keep_the_order_of_a_shared_link(host_link: str) -> None:
    plan = abstract_plan("gpipe", devices=2, offload=0.001, link_groups=[[0, 1]], host_link=host_link)
    plan = replace(plan, schedule=on_one_link(offloading(plan.schedule)))
    events = {event.name: event for event in rehearsed(plan).typical.events}
    for link in plan.schedule.link_orders:
        for before, after in itertools.pairwise(link):
            assert events[after.name].start >= events[before.name].end


def test_a_devices_compute_lane_keeps_the_plans_order() -> None:
    plan = abstract_plan("interleaved", devices=2, chunks=2)
    for device, order in enumerate(plan.schedule.orders):
        events = [e for e in rehearsed(plan).typical.events if e.device == device and e.lane is Lane.COMPUTE]
        assert [e.name for e in sorted(events, key=lambda e: e.start)] == [op.name for op in order]


def test_every_step_is_in_the_trace_and_can_be_compared() -> None:
    plan = abstract_plan("gpipe", devices=2)
    trace = rehearsed(plan, steps=3)
    assert [step.step for step in trace.steps] == [0, 1, 2]
    comparison = compare_timelines(plan, trace, html=None)
    assert comparison.makespan.predicted == pytest.approx(0.015)
    assert (comparison.makespan.ratio or 0) >= 1


def test_scaling_a_plan_scales_every_time_and_no_size() -> None:
    plan = abstract_plan("1f1b", devices=2, activation=7, offload=0.5, parameter_gather=0.5, gathered=1, static=2)
    costs = scaled(plan, 10).costs
    assert scaled(plan, 2).simulate().makespan == 2 * plan.simulate().makespan
    assert costs.parameter_gather == (5, 5)
    assert costs.forward == (0.01, 0.01)
    assert costs.offload == costs.reload == (5, 5)
    assert costs.activation == (7, 7)
