import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from tests.strategies import random_schedules, stage_costs

SENDS = (Kind.SEND_F, Kind.SEND_B)
TRANSFERS = {Kind.O: "d2h", Kind.L: "h2d"}


def waits(schedule: Schedule, costs: StageCosts, later: Op, earlier: Op) -> bool:
    """Whether `later` cannot start before `earlier`, according to the semantics."""
    return earlier in inputs(schedule, later) or goes_before(schedule, costs, earlier, later)


def inputs(schedule: Schedule, op: Op) -> set[Op]:
    """The operations and messages whose results an operation uses."""
    kind, s, j = op
    backward = {Op(Kind.B, s + 1, j), Op(Kind.I, s + 1, j), Op(Kind.RECV_B, s, j)}
    match kind:
        case Kind.F:
            return {Op(Kind.F, s - 1, j), Op(Kind.RECV_F, s, j)}
        case Kind.B | Kind.I:
            return backward | {Op(Kind.L, s, j)}
        case Kind.R:
            return {Op(Kind.L, s, j)}
        case Kind.O:
            return {Op(Kind.F, s, j)}
        case Kind.L:
            before = schedule.orders[schedule.placement.device_of[s]]
            compute = [o for o in before[: before.index(op)] if schedule.computes(o)]
            return {Op(Kind.O, s, j), *compute[-1:]}
        case Kind.SEND_F | Kind.SEND_B:
            return {Op(Kind.F, s, j)} if kind is Kind.SEND_F else {Op(Kind.B, s, j), Op(Kind.I, s, j)}
        case _:
            return {Op(Kind.SEND_F, s - 1, j) if kind is Kind.RECV_F else Op(Kind.SEND_B, s + 1, j)}


def goes_before(schedule: Schedule, costs: StageCosts, earlier: Op, later: Op) -> bool:
    """Whether both are on the same lane of a device, or direction of a link, in this order."""
    device_of = schedule.placement.device_of
    if later.kind in SENDS and costs.communication_model == "receiver":
        receiver = device_of[later.stage + (1 if later.kind is Kind.SEND_F else -1)]
        return device_of[earlier.stage] == receiver and schedule.computes(earlier)
    if device_of[earlier.stage] != device_of[later.stage]:
        return False
    order = schedule.orders[device_of[later.stage]]
    if earlier.kind in SENDS and earlier.kind is later.kind and costs.communication_model == "exclusive":
        first = next(op for op in order if op in inputs(schedule, earlier) | inputs(schedule, later))
        return first in inputs(schedule, earlier)
    if earlier not in order or later not in order or order.index(earlier) >= order.index(later):
        return False
    are_transfers = earlier.kind in TRANSFERS and later.kind in TRANSFERS
    if are_transfers and costs.host_link == "half-duplex":
        return True
    return TRANSFERS.get(earlier.kind) == TRANSFERS.get(later.kind)


@pytest.mark.parametrize("model", ["latency", "exclusive", "receiver", "blocking"])
@settings(max_examples=12)
@given(data=st.data())
def test_operations_of_a_reported_cycle_wait_for_the_next(model: str, data: st.DataObject) -> None:
    schedule = data.draw(random_schedules(deadlocks=True))
    costs = data.draw(stage_costs(stages=schedule.stages, offload=True)).replace(communication_model=model)
    try:
        db.simulate(schedule, costs)
    except db.DeadlockError as error:
        cycle = [Op.parse(name) for name in error.cycle]
    else:
        assume(False)
    assert len(set(cycle)) == len(cycle) >= 2
    for later, earlier in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        assert waits(schedule, costs, later, earlier), f"{later.name} does not wait for {earlier.name}"


def test_blocking_messages_that_deadlock_name_their_devices() -> None:
    orders = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"], ["2F0", "2F1", "2B0", "2B1"]]
    schedule = Schedule.of("test", Placement.linear(3), 2, orders)
    with pytest.raises(db.DeadlockError) as caught:
        db.simulate(schedule, StageCosts.of(stages=3, communication=1, communication_model="blocking"))
    assert caught.value.cycle == ("0B0", "1B0", "1F1", "0F1")


def test_the_deadlock_message_shortens_chains_of_operations() -> None:
    error = db.DeadlockError(("1F2", "1RECV_F2", "0SEND_F2", "0F2", "0B1", "1B1", "1B0", "1B2", "1B3"))

    assert str(error) == (
        "The schedule deadlocks: 1F2 waits for 0F2 waits for 0B1 waits for 1B1 waits for 1B3 waits for 1F2; one of"
        " these has to come earlier in its device's order."
    )
