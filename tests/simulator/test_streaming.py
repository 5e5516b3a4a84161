from fractions import Fraction

import pytest

import debubble as db
from debubble.ir import Number, Op, Placement, Schedule, StageCosts
from debubble.simulator.shared_cores import run_shared
from debubble.simulator.timeline import Timeline

QUARTERS = Fraction(3, 4)
"""The overlap of a stage of four equal units."""


def schedule_of(*orders: str, **entries: object) -> Schedule:
    made = {"name": "by hand", "placement": Placement.of([*range(len(orders))]), "micro_batches": 1, **entries}
    return Schedule(orders=tuple(tuple(map(Op.parse, order.split())) for order in orders), **made)  # type: ignore[arg-type]


def timeline_of(order: str, costs: StageCosts, **entries: object) -> Timeline:
    return db.simulate(schedule_of(order, **entries), costs)


def streaming(**entries: Number) -> StageCosts:
    """Forwards of 4, backwards of 8, transfers of 4."""
    given = {"forward": 4, "backward_input": 4, "backward_weight": 4, "offload": 4, "activation": 4, **entries}
    return StageCosts.of(**{"stages": 1, "offload_overlap": QUARTERS, "reload_overlap": QUARTERS, **given})  # type: ignore[arg-type]


def start(timeline: Timeline, name: str) -> Number:
    return timeline.by_name[name].start


def test_a_slow_offload_begins_behind_the_first_of_the_units() -> None:
    """The first of four units has computed at 1."""
    assert start(timeline_of("0F0 0O0 0L0 0B0", streaming(offload=6)), "0O0") == 1


def test_a_fast_offload_ends_with_the_last_unit_behind_the_forward() -> None:
    """Of four units, each of which leaves in 1/2, the last has computed at 4."""
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming(offload=2))
    assert timeline.by_name["0O0"][3:] == (Fraction(5, 2), Fraction(9, 2))


def test_a_backward_begins_behind_a_fast_reloads_last_unit() -> None:
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming())
    assert start(timeline, "0B0") == start(timeline, "0L0") + 1


def test_a_backward_waits_for_no_unit_of_a_slow_reload() -> None:
    """A reload of 16 has the first unit back at its end, where three quarters of the backward of 8 are over."""
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming(offload=16))
    assert start(timeline, "0B0") == timeline.by_name["0L0"].end - 6


def test_a_half_of_the_activation_is_that_of_the_first_units() -> None:
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming(), offload_fraction={0: Fraction(1, 2)})
    assert timeline.by_name["0O0"][3:] == (1, 3)
    assert start(timeline, "0B0") == timeline.by_name["0F0"].end == timeline.by_name["0L0"].end - 1


def test_an_activation_of_which_little_is_kept_leaves_in_less_time() -> None:
    """The stage keeps a quarter, which four units move in 1/4 each."""
    costs = streaming(activation_recomputed=1)
    timeline = timeline_of("0F0 0O0 0L0 0B0", costs, fused_recompute=frozenset({0}))
    assert timeline.by_name["0O0"][3:] == (Fraction(13, 4), Fraction(17, 4))


def test_a_recomputation_begins_behind_a_fast_reloads_first_unit() -> None:
    timeline = timeline_of("0F0 0O0 0L0 0R0 0B0", streaming(recompute_overlap=QUARTERS, activation_recomputed=4))
    assert start(timeline, "0R0") == start(timeline, "0L0") + 1
    assert start(timeline, "0B0") == timeline.by_name["0R0"].end


def test_a_recomputation_streams_with_the_last_of_the_units_that_move() -> None:
    """Of three quarters that move in 3 each unit's comes in 1; the third recomputes behind the first two, in 2 of 4."""
    costs = streaming(recompute_overlap=QUARTERS, activation_recomputed=4)
    timeline = timeline_of("0F0 0O0 0L0 0R0 0B0", costs, offload_fraction={0: QUARTERS})
    assert start(timeline, "0R0") == timeline.by_name["0L0"].end - 2


def test_what_a_peer_holds_does_not_stream() -> None:
    costs = streaming(stages=2)
    timeline = db.simulate(schedule_of("0F0 0O0 0L0 0B0", "1F0 1B0", peers={0: 1}), costs)
    assert start(timeline, "0O0") == timeline.by_name["0F0"].end
    assert start(timeline, "0B0") >= timeline.by_name["0L0"].end


def test_devices_of_a_link_group_take_turns() -> None:
    """The first units of both have computed at 1 and 5; the second transfer has its turn at 7."""
    costs = streaming(stages=2, offload=6).replace(link_groups=[[0, 1]])
    placed = schedule_of("0F0 0O0 0L0 0B0", "1F0 1O0 1L0 1B0")
    timeline = db.simulate(placed, costs)
    assert [start(timeline, name) for name in ("0O0", "1O0")] == [1, 7]


def test_on_one_core_an_offload_begins_when_its_units_have_computed() -> None:
    """From 1 on the forward has half of the core, and the offload the other half: the former ends at 7."""
    program = db.lower(schedule_of("0F0 0O0 0L0 0B0"), streaming(offload=6))
    timeline = run_shared(program, cores=1)
    assert [timeline.by_name[name][3:] for name in ("0F0", "0O0")] == [(0, 7), (1, 10)]


@pytest.mark.parametrize("name", ["offload_overlap", "reload_overlap"])
def test_an_overlap_of_more_than_the_whole_is_refused(name: str) -> None:
    with pytest.raises(db.InputError, match=f"'{name}' is a share of a transfer, from 0 to 1, not 2"):
        StageCosts.from_dict({"offload": 1, name: 2})


def test_a_costs_file_gives_overlaps() -> None:
    costs = StageCosts.from_dict({"stages": 2, "offload": 1, "offload_overlap": 0.5, "reload_overlap": [0, 1]})
    assert StageCosts.from_dict(costs.to_dict()) == costs
    assert costs.offload_overlap == (0.5, 0.5)
    assert costs.reload_overlap == (0, 1)
