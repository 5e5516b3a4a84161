from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import InfeasibleError
from debubble.ir.stage_costs import HostLink
from tests.strategies import times
from tests.support.schedule_cases import timeline

run = partial(timeline, transfer=0)


@pytest.mark.parametrize(("p", "link"), [(4, "half-duplex"), (8, "full-duplex")])
def test_pipeoffload_half_takes_half_of_1f1b_memory_for_free(p: int, link: HostLink) -> None:
    timeline = run("pipeoffload", p, 4 * p, v=2, transfer=1, link=link, offload="half")
    assert max(timeline.peak_memory) == p // 2
    assert timeline.makespan == 3 * 4 * p + p - 1


def test_pipeoffload_fits_one_activation_at_no_cost() -> None:
    timeline = run("pipeoffload", 8, 32, v=2, transfer=Fraction(1, 2), limit=1)
    assert max(timeline.peak_memory) <= 1
    assert timeline.makespan == 3 * 32 + 7


def test_pipeoffload_offloads_nothing_if_memory_suffices() -> None:
    timeline = run("pipeoffload", 4, 16, v=2, transfer=1, limit=4)
    assert not timeline.program.schedule.offloaded


def grid_costs(p: Any, transfer: Any, limit: Any) -> Any:
    """Costs with F = I = W = 10, messages of 1 and `limit` in activations, of which half remain after I."""
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
        (16, 32, 10, 16, 1170, 1170, 1498, 1290),
    ],
)
def test_each_variant_takes_its_published_time(
    p: int, m: int, transfer: int, limit: int, pipeoffload: int, adaoffload: int, printed_pipeoffload: int,
    printed_adaoffload: int,
) -> None:  # fmt: skip
    costs = grid_costs(p, transfer, limit)
    assert makespan("pipeoffload", m, costs) == pipeoffload
    assert makespan("adaoffload", m, costs) == adaoffload
    assert makespan("pipeoffload", m, costs, variant="paper") == printed_pipeoffload
    assert makespan("adaoffload", m, costs, variant="paper") == printed_adaoffload


@pytest.mark.parametrize(
    ("m", "optimum", "printed_adaoffload", "printed_pipeoffload"), [(4, 15, 18, 21), (8, 27, 30, 33)]
)
def test_adaoffload_is_optimal_on_the_example_of_figure_4(
    m: int, optimum: int, printed_adaoffload: int, printed_pipeoffload: int
) -> None:
    costs = db.StageCosts.of(stages=4, activation=2, activation_after_input=1, offload=1, memory_limit=6)
    assert makespan("adaoffload", m, costs) == optimum
    assert makespan("adaoffload", m, costs, variant="paper") == printed_adaoffload
    assert makespan("pipeoffload", m, costs, variant="paper") == printed_pipeoffload


PREVIOUS = [
    (3, 11, (2, 5, 2), 2, 4, (4, 3), 16, "full-duplex", 131, 133),
    (6, 12, (4, 5, 5), 2, 16, (4, 4), 4, "half-duplex", 624, 624),
    (3, 10, (9, 4, 7), 1, 36, (3, 3), 6, "full-duplex", 500, 539),
    (5, 14, (9, 3, 9), 0, 18, (1, 1), 3.5, "full-duplex", 366, 414),
    (3, 10, (1, 7, 10), 1, 2, (1, 1), 1.5, "full-duplex", 230, 253),
    (5, 5, (6, 2, 4), 2, 24, (2, 1), 3, "half-duplex", 300, 348),
    (6, 6, (8, 3, 3), 0, 32, (2, 2), 5, "half-duplex", 386, 434),
]
"""p, m, (F, I, W), message, transfer, (activation, after I), limit, host link; the best makespans of previous versions
of AdaOffload and PipeOffload."""


@pytest.mark.parametrize(("p", "m", "times", "message", "transfer", "sizes", "limit", "link", "ada", "pipe"), PREVIOUS)
def test_offloading_schedules_are_as_fast_as_before(
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
    """A number of micro-batches, and the costs of equal stages with a link to the host."""
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
@settings(max_examples=12)
def test_the_tuned_variant_is_never_slower_than_the_papers(problem: Any) -> None:
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
def test_the_objective_span_gives_the_shorter_span(name: str) -> None:
    costs = grid_costs(4, 20, 3)
    chunks = {"chunks": 1} if name == "pipeoffload" else {}
    built = {
        objective: db.schedules[name](devices=4, micro_batches=8, costs=costs, objective=objective, **chunks)
        for objective in ("makespan", "span")
    }
    assert db.simulate(built["span"], costs).span <= db.simulate(built["makespan"], costs).span


def test_the_papers_pipeoffload_has_fused_backwards() -> None:
    costs = grid_costs(4, 5, 3)
    schedule = db.schedules["pipeoffload"](devices=4, micro_batches=4, costs=costs, chunks=1, variant="paper")
    assert not schedule.split_backward
    assert {stage for stage, _ in schedule.offloaded} == {0, 1, 2}
    assert schedule.offloaded >= {(s, j) for s in (0, 1) for j in range(4)}
    with pytest.raises(db.InputError, match="offloads everything"):
        db.schedules["pipeoffload"](devices=4, micro_batches=4, costs=costs, chunks=1, variant="paper", offload="half")


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(db.InputError, match="it must be tuned or paper"):
        db.schedules["adaoffload"](devices=2, micro_batches=4, variant="best")


@pytest.mark.parametrize(("p", "transfer"), [(4, Fraction(1, 2)), (5, 3), (16, 3)])
def test_bpipe_never_exceeds_its_memory_bound(p: int, transfer: Any) -> None:
    bound = (p + 3) // 2
    timeline = run("bpipe", p, 4 * p, transfer=transfer, limit=bound)
    assert max(timeline.peak_memory) <= bound


@pytest.mark.parametrize("p", [4, 16])
def test_bpipe_costs_no_time_if_transfers_are_hidden(p: int) -> None:
    assert run("bpipe", p, 4 * p, transfer=1, limit=(p + 3) // 2).makespan == 3 * (4 * p + p - 1)
