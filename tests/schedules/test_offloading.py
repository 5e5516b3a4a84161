"""Schedules that move activations: what they hold, and that the link's time is never left out."""

from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import InfeasibleError, Kind, Lane
from debubble.ir.stage_costs import HostLink
from tests.strategies import times
from tests.support.schedule_cases import timeline

run = partial(timeline, transfer=0)


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("link", ["full-duplex", "half-duplex"])
def test_pipeoffload_half_needs_half_of_1f1bs_memory_and_waits_for_no_transfer(p: int, link: HostLink) -> None:
    timeline = run("pipeoffload", p, 4 * p, v=2, transfer=1, link=link, offload="half")
    assert max(timeline.peak_memory) == p // 2
    assert timeline.makespan == 3 * 4 * p + p - 1


@pytest.mark.parametrize(("v", "limit", "bubble"), [(2, 1, 7), (4, Fraction(3, 4), Fraction(7, 2))])
def test_pipeoffload_keeps_a_limit_of_one_activation_at_no_cost(v: int, limit: Any, bubble: Any) -> None:
    timeline = run("pipeoffload", 8, 32, v=v, transfer=Fraction(1, 2), limit=limit)
    assert max(timeline.peak_memory) <= limit
    assert timeline.makespan == 3 * 32 + bubble


def test_pipeoffload_without_need_offloads_nothing() -> None:
    timeline = run("pipeoffload", 4, 16, v=2, transfer=1, limit=4)
    assert not timeline.program.schedule.offloaded


def test_a_link_that_cannot_keep_up_shows_as_waiting() -> None:
    fast = run("pipeoffload", 4, 16, v=2, transfer=1, limit=1)
    slow = run("pipeoffload", 4, 16, v=2, transfer=4, limit=1)
    assert slow.makespan > fast.makespan
    assert max(slow.peak_memory) <= 1


def test_a_reload_ends_when_its_backward_starts_or_before() -> None:
    timeline = run("pipeoffload", 4, 8, v=2, transfer=2, offload="full")
    by_name = timeline.by_name
    reloads = [o for o in timeline.operations if o.lane is Lane.H2D]
    assert reloads
    for o in reloads:
        assert o.end <= by_name[o.op._replace(kind=Kind.I).name].start


def grid_costs(p: Any, transfer: Any, limit: Any) -> Any:
    """F = I = W = 10, messages of 1; `limit` in activations, of which W keeps half."""
    return db.StageCosts.of(
        stages=p, forward=10, backward_input=10, backward_weight=10, communication=1, activation=2, offload=transfer,
        memory_limit=2 * limit,
    )  # fmt: skip


def makespan(name: Any, m: Any, costs: Any, **options: Any) -> Any:
    chunks = {"chunks": 1} if name == "pipeoffload" else {}
    schedule = db.schedules[name](devices=costs.stages, micro_batches=m, costs=costs, **chunks, **options)
    return db.simulate(schedule, costs).makespan


@pytest.mark.parametrize(
    ("p", "m", "transfer", "limit", "pipeoffload", "adaoffload", "printed_pipeoffload", "printed_adaoffload"),
    [
        (4, 8, 20, 3, 302, 302, 360, 418),
        (8, 16, 5, 3, 634, 634, 730, 634),
        (8, 32, 20, 4, 1114, 1114, 1328, 1724),
        (8, 32, 20, 8, 1058, 1058, 1328, 1264),
        (16, 32, 10, 16, 1170, 1170, 1498, 1290),
    ],
)
def test_each_variant_takes_its_time_on_the_grid(
    p: int,
    m: int,
    transfer: int,
    limit: int,
    pipeoffload: int,
    adaoffload: int,
    printed_pipeoffload: int,
    printed_adaoffload: int,
) -> None:
    costs = grid_costs(p, transfer, limit)
    assert makespan("pipeoffload", m, costs) == pipeoffload
    assert makespan("adaoffload", m, costs) == adaoffload
    assert makespan("pipeoffload", m, costs, variant="paper") == printed_pipeoffload
    assert makespan("adaoffload", m, costs, variant="paper") == printed_adaoffload


@pytest.mark.parametrize(
    ("m", "optimum", "printed_adaoffload", "printed_pipeoffload"), [(4, 15, 18, 21), (6, 21, 24, 27), (8, 27, 30, 33)]
)
def test_adaoffload_is_optimal_on_figure_4s_toy_and_the_printed_rules_are_not(
    m: int, optimum: int, printed_adaoffload: int, printed_pipeoffload: int
) -> None:
    costs = db.StageCosts.of(stages=4, activation=2, activation_after_input=1, offload=1, memory_limit=6)
    assert makespan("adaoffload", m, costs) == optimum
    assert makespan("adaoffload", m, costs, variant="paper") == printed_adaoffload
    assert makespan("pipeoffload", m, costs, variant="paper") == printed_pipeoffload


FORMER = [
    (3, 11, (2, 5, 2), 2, 4, (4, 3), 16, "full-duplex", 131, 133),
    (2, 9, (1, 7, 7), 0, 2, (3, 1), 9, "full-duplex", 141, 142),
    (4, 2, (1, 1, 9), 0, 2, (6, 1), 24, "full-duplex", 27, 27),
    (6, 5, (8, 8, 9), 0, 8, (2, 2), 5, "half-duplex", 205, 205),
    (4, 2, (7, 9, 2), 0, 7, (1, 1), 5, "half-duplex", 82, 82),
    (6, 12, (4, 5, 5), 2, 16, (4, 4), 4, "half-duplex", 624, 624),
    (3, 13, (7, 7, 3), 1, 28, (6, 6), 21, "half-duplex", 251, 251),
    (2, 9, (9, 2, 3), 2, 9, (4, 0), 10, "full-duplex", 145, 145),
    (4, 13, (10, 10, 10), 2, 6, (2, 2), 5, "full-duplex", 462, 462),
    (3, 10, (9, 4, 7), 1, 36, (3, 3), 6, "full-duplex", 500, 539),
    (5, 14, (9, 3, 9), 0, 18, (1, 1), 3.5, "full-duplex", 366, 414),
    (6, 8, (8, 6, 7), 1, 1, (5, 4), 27.5, "half-duplex", 223, 223),
    (5, 11, (1, 4, 3), 0, 1, (5, 2), 5, "full-duplex", 125, 138),
    (2, 2, (8, 1, 5), 0, 8, (1, 0), 2, "half-duplex", 36, 36),
    (2, 4, (3, 5, 9), 0, 3, (6, 5), 12, "half-duplex", 73, 73),
    (4, 9, (8, 2, 1), 1, 16, (3, 3), 7.5, "half-duplex", 313, 313),
    (2, 6, (9, 4, 10), 2, 1, (2, 0), 5, "full-duplex", 149, 153),
    (2, 13, (3, 8, 9), 2, 12, (2, 2), 6, "half-duplex", 272, 272),
    (3, 10, (1, 7, 10), 1, 2, (1, 1), 1.5, "full-duplex", 230, 253),
    (2, 6, (2, 2, 5), 1, 2, (4, 4), 8, "full-duplex", 59, 59),
    (2, 10, (1, 10, 4), 2, 1, (6, 4), 18, "full-duplex", 165, 165),
    (5, 5, (6, 2, 4), 2, 24, (2, 1), 3, "half-duplex", 300, 348),
    (4, 10, (8, 1, 6), 2, 8, (1, 0), 2.5, "half-duplex", 190, 190),
    (6, 14, (3, 6, 7), 0, 3, (6, 0), 24, "half-duplex", 242, 254),
    (6, 6, (8, 3, 3), 0, 32, (2, 2), 5, "half-duplex", 386, 434),
]
"""p, m, (F, I, W), message, transfer, (activation, after I), limit, host link; the best that former versions of
AdaOffload and PipeOffload took."""


@pytest.mark.parametrize(("p", "m", "times", "message", "transfer", "sizes", "limit", "link", "ada", "pipe"), FORMER)
def test_neither_is_slower_than_it_was(
    p: Any, m: Any, times: Any, message: Any, transfer: Any, sizes: Any, limit: Any, link: Any, ada: Any, pipe: Any
) -> None:
    costs = db.StageCosts.of(
        stages=p, forward=times[0], backward_input=times[1], backward_weight=times[2], communication=message,
        activation=sizes[0], activation_after_input=sizes[1], offload=transfer, memory_limit=limit, host_link=link,
    )  # fmt: skip
    assert makespan("adaoffload", m, costs) <= ada
    assert makespan("pipeoffload", m, costs) <= pipe


@st.composite
def uniform_problems(draw: Any) -> Any:
    """A number of micro-batches, and equal stages with a link to the host."""
    p, m, activation = draw(st.integers(2, 5)), draw(st.integers(1, 8)), 2 * draw(times)
    costs = db.StageCosts.of(
        stages=p, forward=draw(times), backward_input=draw(times), backward_weight=draw(times),
        communication=draw(st.integers(0, 3)), activation=activation,
        activation_after_input=draw(st.integers(0, activation)), offload=draw(st.integers(1, 30)),
        reload=draw(st.integers(1, 30)), memory_limit=Fraction(draw(st.integers(4, 4 * p)), 2) * activation,
        host_link=draw(st.sampled_from(["full-duplex", "half-duplex"])),
    )  # fmt: skip
    return m, costs


@given(uniform_problems())
@settings(max_examples=25, deadline=None)
def test_the_tuned_variant_is_never_slower_than_the_papers_nor_adaoffload_than_pipeoffload(problem: Any) -> None:
    m, costs = problem
    pipeoffload, adaoffload = makespan("pipeoffload", m, costs), makespan("adaoffload", m, costs)
    assert adaoffload <= pipeoffload
    for name, tuned in (("pipeoffload", pipeoffload), ("adaoffload", adaoffload)):
        try:
            printed = makespan(name, m, costs, variant="paper")
        except InfeasibleError:
            continue
        assert tuned <= printed


@pytest.mark.parametrize("name", ["pipeoffload", "adaoffload"])
def test_the_span_chooses_where_it_is_the_objective(name: str) -> None:
    costs = grid_costs(4, 20, 3)
    chunks = {"chunks": 1} if name == "pipeoffload" else {}
    built = {
        objective: db.schedules[name](devices=4, micro_batches=8, costs=costs, objective=objective, **chunks)
        for objective in ("makespan", "span")
    }
    assert db.simulate(built["span"], costs).span <= db.simulate(built["makespan"], costs).span


def test_the_papers_pipeoffload_moves_whole_backwards_and_refuses_half() -> None:
    costs = grid_costs(4, 5, 3)
    schedule = db.schedules["pipeoffload"](devices=4, micro_batches=4, costs=costs, chunks=1, variant="paper")
    assert not schedule.split_backward
    assert {stage for stage, _ in schedule.offloaded} == {0, 1, 2}
    assert schedule.offloaded >= {(s, j) for s in (0, 1) for j in range(4)}
    with pytest.raises(db.InputError, match="offloads everything"):
        db.schedules["pipeoffload"](devices=4, micro_batches=4, costs=costs, chunks=1, variant="paper", offload="half")


@pytest.mark.parametrize("name", ["pipeoffload", "adaoffload"])
def test_an_unknown_variant_is_refused(name: str) -> None:
    with pytest.raises(db.InputError, match="it must be tuned or paper"):
        db.schedules[name](devices=2, micro_batches=4, variant="best")


@pytest.mark.parametrize("p", [4, 5, 8, 16])
@pytest.mark.parametrize("transfer", [Fraction(1, 2), 1, 3])
def test_bpipe_never_holds_more_than_its_bound_however_slow_the_link(p: int, transfer: Any) -> None:
    bound = (p + 3) // 2
    timeline = run("bpipe", p, 4 * p, transfer=transfer, limit=bound)
    assert max(timeline.peak_memory) <= bound


@pytest.mark.parametrize("p", [4, 8, 16])
def test_bpipe_costs_no_time_when_a_transfer_hides_behind_a_forward(p: int) -> None:
    assert run("bpipe", p, 4 * p, transfer=1, limit=(p + 3) // 2).makespan == 3 * (4 * p + p - 1)
