import pytest

import debubble as db
from debubble.ir import Kind, lower_forwards
from debubble.ir.stage_costs import CommunicationModel
from debubble.simulator import run


@pytest.mark.parametrize(("name", "model"), [("1f1b", "latency"), ("zb-v", "blocking"), ("pipeoffload", "exclusive")])
def test_a_program_of_forwards_has_every_forward_once(name: str, model: CommunicationModel) -> None:
    schedule = db.schedules[name](devices=4, micro_batches=8)
    costs = db.StageCosts.of(stages=schedule.stages, communication=1, communication_model=model, offload=1)
    program = lower_forwards(schedule, costs)
    device_of = schedule.placement.device_of
    boundaries = sum(device_of[s] != device_of[s + 1] for s in range(schedule.stages - 1))
    kinds = [instruction.op.kind for instruction in program.instructions]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        Kind.F: 8 * schedule.stages, Kind.SEND_F: 8 * boundaries, Kind.RECV_F: 8 * boundaries,
    }  # fmt: skip
    assert len(run(program).operations) == len(kinds)


def test_forwards_have_bubbles_only_at_the_ends() -> None:
    schedule = db.schedules["1f1b"](devices=4, micro_batches=8)
    assert run(lower_forwards(schedule, db.StageCosts.of(stages=4))).makespan == 4 - 1 + 8


def test_a_memory_limit_does_not_delay_forwards() -> None:
    schedule = db.schedules["gpipe"](devices=2, micro_batches=4)
    costs = db.StageCosts.of(stages=2, activation=10, memory_limit=40)
    assert (
        run(lower_forwards(schedule, costs)).makespan
        == run(lower_forwards(schedule, db.StageCosts.of(stages=2))).makespan
    )
