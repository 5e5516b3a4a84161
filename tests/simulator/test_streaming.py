from fractions import Fraction

import pytest

import debubble as db
from debubble.ir import Number, Op, Placement, Schedule, StageCosts
from debubble.simulator.shared_cores import run_shared
from debubble.simulator.timeline import Timeline

QUARTERS = Fraction(3, 4)
"""The overlap of a stage of four equal units."""


def schedule_of(*orders: str, **entries: object) -> Schedule:
    fields = {"name": "by hand", "placement": Placement.of([*range(len(orders))]), "micro_batches": 1, **entries}
    return Schedule(orders=tuple(tuple(map(Op.parse, order.split())) for order in orders), **fields)  # type: ignore[arg-type]


def timeline_of(order: str, costs: StageCosts, **entries: object) -> Timeline:
    return db.simulate(schedule_of(order, **entries), costs)


def streaming(**entries: Number) -> StageCosts:
    """Costs of forwards of 4, backwards of 8 and transfers of 4."""
    values = {"forward": 4, "backward_input": 4, "backward_weight": 4, "offload": 4, "activation": 4, **entries}
    return StageCosts.of(**{"stages": 1, "offload_overlap": QUARTERS, "reload_overlap": QUARTERS, **values})  # type: ignore[arg-type]


def start(timeline: Timeline, name: str) -> Number:
    return timeline.by_name[name].start


def test_a_slow_offload_begins_after_the_first_unit() -> None:
    """The first of four units ends at 1."""
    assert start(timeline_of("0F0 0O0 0L0 0B0", streaming(offload=6)), "0O0") == 1


def test_a_fast_offload_ends_one_unit_after_the_forward() -> None:
    """The last of four units, each of which moves in 1/2, ends at 4."""
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming(offload=2))
    assert timeline.by_name["0O0"][3:] == (Fraction(5, 2), Fraction(9, 2))


def test_a_backward_begins_after_a_units_fast_reload() -> None:
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming())
    assert start(timeline, "0B0") == start(timeline, "0L0") + 1


def test_a_backward_overlaps_a_slow_reload() -> None:
    """The first unit returns at the end of a reload of 16, when three quarters of the backward of 8 are over."""
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming(offload=16))
    assert start(timeline, "0B0") == timeline.by_name["0L0"].end - 6


def test_a_half_offload_moves_the_first_units() -> None:
    timeline = timeline_of("0F0 0O0 0L0 0B0", streaming(), offload_fraction={0: Fraction(1, 2)})
    assert timeline.by_name["0O0"][3:] == (1, 3)
    assert start(timeline, "0B0") == timeline.by_name["0F0"].end == timeline.by_name["0L0"].end - 1


def test_recomputed_activations_offload_in_less_time() -> None:
    """The stage keeps a quarter of its activation; each of four units moves in 1/4."""
    costs = streaming(activation_recomputed=1)
    timeline = timeline_of("0F0 0O0 0L0 0B0", costs, fused_recompute=frozenset({0}))
    assert timeline.by_name["0O0"][3:] == (Fraction(13, 4), Fraction(17, 4))


def test_a_recomputation_begins_after_the_first_unit_returns() -> None:
    timeline = timeline_of("0F0 0O0 0L0 0R0 0B0", streaming(recompute_overlap=QUARTERS, activation_recomputed=4))
    assert start(timeline, "0R0") == start(timeline, "0L0") + 1
    assert start(timeline, "0B0") == timeline.by_name["0R0"].end


def test_a_recomputation_overlaps_a_partial_reload() -> None:
    """Three of four units reload in 1 each; the third recomputes after the first two, which take 2 of 4."""
    costs = streaming(recompute_overlap=QUARTERS, activation_recomputed=4)
    timeline = timeline_of("0F0 0O0 0L0 0R0 0B0", costs, offload_fraction={0: QUARTERS})
    assert start(timeline, "0R0") == timeline.by_name["0L0"].end - 2


def test_transfers_to_a_peer_do_not_overlap() -> None:
    costs = streaming(stages=2)
    timeline = db.simulate(schedule_of("0F0 0O0 0L0 0B0", "1F0 1B0", peers={0: 1}), costs)
    assert start(timeline, "0O0") == timeline.by_name["0F0"].end
    assert start(timeline, "0B0") >= timeline.by_name["0L0"].end


def test_devices_of_a_link_group_take_turns() -> None:
    """The first units of the devices end at 1 and 5; the second transfer begins when the first ends at 7."""
    costs = streaming(stages=2, offload=6).replace(link_groups=[[0, 1]])
    placed = schedule_of("0F0 0O0 0L0 0B0", "1F0 1O0 1L0 1B0")
    timeline = db.simulate(placed, costs)
    assert [start(timeline, name) for name in ("0O0", "1O0")] == [1, 7]


def test_an_offload_on_one_core_begins_after_its_first_unit() -> None:
    """From 1 on, forward and offload have half of the core each, so that the forward ends at 7."""
    program = db.lower(schedule_of("0F0 0O0 0L0 0B0"), streaming(offload=6))
    timeline = run_shared(program, cores=1)
    assert [timeline.by_name[name][3:] for name in ("0F0", "0O0")] == [(0, 7), (1, 10)]


@pytest.mark.parametrize("name", ["offload_overlap", "reload_overlap"])
def test_an_overlap_above_one_is_refused(name: str) -> None:
    with pytest.raises(db.InputError, match=f"'{name}' is a share of a transfer, from 0 to 1, not 2"):
        StageCosts.from_dict({"offload": 1, name: 2})


def test_a_costs_file_gives_overlaps() -> None:
    costs = StageCosts.from_dict({"stages": 2, "offload": 1, "offload_overlap": 0.5, "reload_overlap": [0, 1]})
    assert StageCosts.from_dict(costs.to_dict()) == costs
    assert costs.offload_overlap == (0.5, 0.5)
    assert costs.reload_overlap == (0, 1)
