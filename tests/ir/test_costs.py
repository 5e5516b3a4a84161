from __future__ import annotations

import pytest

from debubble.ir import InputError, StageCosts


def test_numbers_hold_for_every_stage_and_defaults_follow_the_costs_file() -> None:
    costs = StageCosts.of(stages=2, forward=3, activation=[4, 5], offload=2)
    assert costs.forward == (3, 3)
    assert costs.recompute == (3, 3)
    assert costs.activation_after_input == (2, 2.5)
    assert costs.reload == (2, 2)
    assert costs.limit_of(1) is None


def test_lists_fix_the_number_of_stages() -> None:
    assert StageCosts.of(forward=[1, 2, 3]).stages == 3


def test_costs_survive_a_round_trip_through_a_dict() -> None:
    costs = StageCosts.of(stages=2, forward=[1, 2], offload=3, memory_limit=[5, 6], link_groups=[[0, 1]])
    assert StageCosts.from_dict(costs.to_dict()) == costs


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"forward": [1, 2], "stages": 3}, "'forward' has 2 numbers for 3 stages"),
        ({"forward": -1}, "must not be negative"),
        ({"forward": "fast"}, "must be a number or a list of numbers"),
        ({"forward": []}, "not an empty list"),
        ({"forward": True}, "must be a number or a list of numbers"),
        ({"speed": 1}, "no entry 'speed'"),
        ({"stages": 0}, "at least one stage"),
        ({"communication_model": "magic"}, "latency, exclusive or blocking"),
        ({"reload": 1}, "no meaning without 'offload'"),
        ({"forward": float("nan")}, "must not be negative or infinite"),
    ],
)
def test_malformed_entries_are_answered_in_a_sentence(entries: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StageCosts.from_dict(entries)
