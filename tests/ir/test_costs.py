from collections.abc import Callable
from typing import Any

import pytest

from debubble.ir import InputError, StageCosts, lower
from debubble.planners import FixedStages, Problem
from debubble.schedules import schedules


def test_single_numbers_apply_to_every_stage() -> None:
    costs = StageCosts.of(stages=2, forward=3, activation=[4, 5], offload=2)
    assert costs.forward == (3, 3)
    assert costs.recompute == (3, 3)
    assert costs.activation_after_input == (2, 2.5)
    assert costs.reload == (2, 2)
    assert costs.limit_of(1) is None


def test_costs_survive_a_round_trip_through_a_dict() -> None:
    costs = StageCosts.of(stages=2, forward=[1, 2], offload=3, memory_limit=[5, 6], link_groups=[[0, 1]])
    assert StageCosts.from_dict(costs.to_dict()) == costs


def test_a_link_group_without_devices_is_omitted() -> None:
    assert StageCosts.of(stages=2, link_groups=[[0, 1], []]).link_groups == ((0, 1),)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"link_groups": [[0, 9]]}, "'link_groups' names device 9, but there are 4 devices"),
        ({"static": [1, 2, 3]}, "'static' has 3 numbers for 4 devices"),
        ({"memory_limit": [9, 9, 9]}, "'memory_limit' has 3 numbers for 4 devices"),
        ({"micro_batch_scale": [1, 2]}, "'micro_batch_scale' has 2 numbers for 8 micro-batches"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda costs: schedules["zb"](devices=4, micro_batches=8, costs=costs),
        lambda costs: Problem(devices=4, micro_batches=8, workload=FixedStages(costs)),
        lambda costs: lower(schedules["1f1b"](devices=4, micro_batches=8), costs),
    ],
    ids=["to build a schedule", "to plan", "to lower"],
)
def test_entries_for_another_number_of_devices_are_refused(
    use: Callable[[StageCosts], object], entries: dict[str, Any], message: str
) -> None:
    costs = StageCosts.of(stages=4, **entries)
    with pytest.raises(InputError, match=message):
        use(costs)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"forward": [1, 2], "stages": 3}, "'forward' has 2 numbers for 3 stages"),
        ({"forward": -1}, "must not be negative"),
        ({"forward": "fast"}, "must be a number or a list of numbers"),
        ({"forward": []}, "not an empty list"),
        ({"speed": 1}, "no entry 'speed'"),
        ({"stages": 0}, "must be a whole number, 1 or more, not 0"),
        ({"communication_model": "magic"}, "latency, exclusive, receiver or blocking"),
        ({"reload": 1}, "no meaning without 'offload'"),
        ({"forward": float("nan")}, "must not be negative or infinite"),
        ({"forward": 10**400}, "'forward' must not be more than 1e\\+18"),
        ({"forward": None}, "'forward' must be a number or a list of numbers, not None"),
        ({"link_groups": 3}, "'link_groups' must be a list of lists of devices"),
        ({"link_groups": [["0"]]}, "'link_groups' must be a list of lists of devices"),
        ({"link_groups": [[-1]]}, "'link_groups' must be a list of lists of devices"),
        ({"link_groups": [[0, 1], [1]]}, "'link_groups' names device 1 twice"),
    ],
)
def test_malformed_entries_are_refused(entries: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StageCosts.from_dict(entries)
