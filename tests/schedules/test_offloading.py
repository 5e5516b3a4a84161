"""Schedules that move activations: what they hold, and that the link's time is never left out."""

from fractions import Fraction

import pytest

import debubble as db
from debubble.ir import Kind, Lane


def run(name, p, m, v=1, *, transfer=0, limit=None, link="full-duplex", **options):
    """F = I = W = 1 per stage, one micro-batch's activation 1, freed by W; `transfer` is one way, over F."""
    share = Fraction(1, v)
    costs = db.StageCosts.of(
        stages=p * v,
        forward=share,
        backward_input=share,
        backward_weight=share,
        activation=share,
        activation_after_input=share,
        offload=share * transfer,
        host_link=link,
        memory_limit=limit,
    )
    return db.simulate(db.schedules[name](devices=p, micro_batches=m, chunks=v, costs=costs, **options), costs)


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("link", ["full-duplex", "half-duplex"])
def test_pipeoffload_half_needs_half_of_1f1bs_memory_and_waits_for_no_transfer(p, link):
    timeline = run("pipeoffload", p, 4 * p, v=2, transfer=1, link=link, offload="half")
    assert max(timeline.peak_memory) == p // 2
    assert timeline.makespan == 3 * 4 * p + p - 1


@pytest.mark.parametrize(("v", "limit", "bubble"), [(2, 1, 7), (4, Fraction(3, 4), Fraction(7, 2))])
def test_pipeoffload_keeps_a_limit_of_one_activation_at_no_cost(v, limit, bubble):
    timeline = run("pipeoffload", 8, 32, v=v, transfer=Fraction(1, 2), limit=limit)
    assert max(timeline.peak_memory) <= limit
    assert timeline.makespan == 3 * 32 + bubble


def test_pipeoffload_without_need_offloads_nothing():
    timeline = run("pipeoffload", 4, 16, v=2, transfer=1, limit=4)
    assert not timeline.program.schedule.offloaded


def test_a_link_that_cannot_keep_up_shows_as_waiting():
    fast = run("pipeoffload", 4, 16, v=2, transfer=1, limit=1)
    slow = run("pipeoffload", 4, 16, v=2, transfer=4, limit=1)
    assert slow.makespan > fast.makespan
    assert max(slow.peak_memory) <= 1


def test_a_reload_ends_when_its_backward_starts_or_before():
    timeline = run("pipeoffload", 4, 8, v=2, transfer=2, offload="full")
    by_name = timeline.by_name
    reloads = [o for o in timeline.operations if o.lane is Lane.H2D]
    assert reloads
    for o in reloads:
        assert o.end <= by_name[o.op._replace(kind=Kind.I).name].start


@pytest.mark.parametrize(
    ("p", "m", "transfer", "limit", "solver"), [(4, 8, 10, 2, 306), (8, 16, 5, 3, 634), (8, 32, 10, 4, 1114)]
)
def test_adaoffload_takes_no_longer_than_offloading_everything_just_in_time(p, m, transfer, limit, solver):
    costs = db.StageCosts.of(
        stages=p,
        forward=10,
        backward_input=10,
        backward_weight=10,
        communication=1,
        activation=2,
        offload=transfer,
        memory_limit=2 * limit,
    )
    schedule = db.schedules["adaoffload"](devices=p, micro_batches=m, costs=costs)
    assert db.simulate(schedule, costs).makespan <= solver


@pytest.mark.parametrize("p", [4, 5, 8, 16])
@pytest.mark.parametrize("transfer", [Fraction(1, 2), 1, 3])
def test_bpipe_never_holds_more_than_its_bound_however_slow_the_link(p, transfer):
    bound = (p + 3) // 2
    timeline = run("bpipe", p, 4 * p, transfer=transfer, limit=bound)
    assert max(timeline.peak_memory) <= bound


@pytest.mark.parametrize("p", [4, 8, 16])
def test_bpipe_costs_no_time_when_a_transfer_hides_behind_a_forward(p):
    assert run("bpipe", p, 4 * p, transfer=1, limit=(p + 3) // 2).makespan == 3 * (4 * p + p - 1)
