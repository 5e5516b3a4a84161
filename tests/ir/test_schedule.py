from dataclasses import replace
from typing import Any

import pytest

from debubble.ir import InputError, Kind, Op, Placement, Schedule, ScheduleError, check


def one_device(*names: str, micro_batches: int = 1) -> Schedule:
    return Schedule.of("test", Placement.linear(1), micro_batches, [names])


def test_an_operation_is_parsed_from_its_name() -> None:
    assert Op.parse("12SEND_F3") == Op(Kind.SEND_F, 12, 3)
    assert str(Op.parse("12SEND_F3")) == f"{Op.parse('12SEND_F3')}" == "12SEND_F3"
    assert Op(Kind.I, 0, 7).name == "0I7"


@pytest.mark.parametrize("name", ["", "F0", "0X1", "0F", "0F1 ", "-1F0", "0F1junk", "0F" + "9" * 5000])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is not an operation"):
        Op.parse(name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0B0"], "0F0 is missing"),
        (["0F0"], "backward of stage 0, micro-batch 0 is missing"),
        (["0B0", "0F0"], "0B0 comes before 0F0"),
        (["0F0", "0I0"], "0W0 is missing"),
        (["0F0", "0W0", "0I0"], "0W0 comes before 0I0"),
        (["0F0", "0B0", "0I0", "0W0"], "both a full and a split backward"),
        (["0F0", "0F0", "0B0"], "0F0 appears twice"),
        (["0F0", "0O0", "0B0"], "0L0 is missing"),
        (["0F0", "0L0", "0O0", "0B0"], "0L0 comes before 0O0"),
        (["0F0", "0B0", "0R0"], "0B0 comes before 0R0"),
        (["0F0", "0B0", "1F0"], "outside the 1 stages"),
        (["0F0", "0SEND_F0", "0B0"], "is a message"),
        (["0F0", "0S0", "0B0"], "comes before the stage's last backward"),
        (["0F0", "0B0", "0S0", "0D0"], "comes before the stage's last backward"),
    ],
)
def test_an_invalid_order_names_the_operation(names: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(one_device(*names))


def test_an_operation_on_the_wrong_device_is_refused() -> None:
    schedule = Schedule.of("test", Placement.linear(2), 1, [["0F0", "0B0", "1F0"], ["1B0"]])
    with pytest.raises(ScheduleError, match="1F0 is on device 0, but its stage is on device 1"):
        check(schedule)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"fused_recompute": frozenset({55})}, "'fused_recompute' names stage 55, but the schedule has 2 stages"),
        ({"recompute_fraction": {2: 0.5}}, "'recompute_fraction' names stage 2, but the schedule has 2 stages"),
        ({"offload_fraction": {-1: 0.5}}, "'offload_fraction' names stage -1, but the schedule has 2 stages"),
        ({"offload_fraction": {1: float("nan")}}, "'offload_fraction' of stage 1 must be between 0 and 1, not nan"),
        ({"recompute_fraction": {0: (1, 0.5)}}, "'recompute_fraction' of stage 0 has 2 shares for 1 micro-batches"),
        ({"deeper": frozenset({(1, 1)})}, "'deeper' names micro-batch 1 of stage 1, but the schedule has 2 stages"),
        ({"peers": {0: 9}}, "'peers' names device 9, but the schedule has 2 devices"),
        ({"peers": {1: 1}}, "'peers' lets device 1 offload to itself"),
        ({"asynchronous": frozenset({1})}, "'asynchronous' names the boundary after stage 1"),
        ({"link_orders": ((Op(Kind.O, 0, 0),),)}, "'link_orders' names 0O0, which is no transfer of the schedule"),
    ],
)
def test_an_entry_about_a_missing_stage_or_device_is_refused(entries: dict[str, Any], message: str) -> None:
    schedule = Schedule.of("test", Placement.linear(2), 1, [["0F0", "0B0"], ["1F0", "1B0"]])
    with pytest.raises(ScheduleError, match=message):
        check(replace(schedule, **entries))


def offloading() -> Schedule:
    schedule = Schedule.of("test", Placement.linear(1), 1, [["0F0", "0O0", "0L0", "0B0"]])
    return replace(schedule, link_orders=((Op(Kind.O, 0, 0), Op(Kind.L, 0, 0)),))


def test_a_transfer_may_occur_once_in_link_orders() -> None:
    twice = replace(offloading(), link_orders=((Op(Kind.O, 0, 0),), (Op(Kind.O, 0, 0),)))
    with pytest.raises(ScheduleError, match="'link_orders' names 0O0 twice"):
        check(twice)


def test_replaced_transfers_leave_the_link_orders() -> None:
    replaced = offloading().replacing(lambda op: () if op.kind is Kind.L else (op,))
    assert replaced.link_orders == ((Op(Kind.O, 0, 0),),)


def test_equal_schedules_have_equal_hashes() -> None:
    one, other = (
        replace(one_device("0F0", "0B0"), fused_recompute=frozenset({0}), recompute_fraction={0: share})
        for share in (0.5, 0.5)
    )
    assert {one: "found"}[other] == "found"


def test_placements_assign_stages_to_devices() -> None:
    assert Placement.looped(2, 2).device_of == (0, 1, 0, 1)
    assert Placement.v_shape(3, 2).device_of == (0, 1, 2, 2, 1, 0)
    assert Placement.v_shape(2, 3).stages_of == ((0, 3, 4), (1, 2, 5))


def test_a_placement_with_an_empty_device_is_refused() -> None:
    with pytest.raises(InputError, match="Every device from 0 up must hold a stage"):
        Placement.of([0, 2])
