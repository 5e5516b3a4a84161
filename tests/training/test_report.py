from fractions import Fraction

import debubble as db
from debubble.ir import PlannedUnit
from debubble.ir.trace import Trace, TraceEvent, TraceStep
from debubble.training.report import scenes


def test_devices_that_share_cores_are_compared_with_what_these_cores_can_do():
    costs = db.StageCosts.of(stages=2, forward=1, backward_input=1, backward_weight=1)
    schedule = db.schedules["gpipe"](devices=2, micro_batches=2)
    plan = db.Plan(
        planner="test", schedule=schedule, costs=costs, lower_bound=0,
        partition=((PlannedUnit("stage", 0),), (PlannedUnit("stage", 1),)),
    )  # fmt: skip
    timeline = plan.simulate()
    events = tuple(TraceEvent(o.name, o.device, o.lane, o.start, o.end) for o in timeline.operations)
    trace = Trace(devices=2, steps=(TraceStep(step=0, events=events),))
    alone, _ = scenes(plan, trace, cores=None)
    enough, _ = scenes(plan, trace, cores=2)
    shared, measured = scenes(plan, trace, cores=1)
    assert alone.timeline.makespan == enough.timeline.makespan == measured.timeline.makespan == 9
    assert shared.timeline.makespan == Fraction(12)
    assert "2 devices on 1 core" in shared.title
