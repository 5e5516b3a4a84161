"""An evaluation that begins at a mark of the last one says what one from the start says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from debubble.ir import Placement
from debubble.search.annealing.arrays import arrays_of, encode
from debubble.search.annealing.evaluate import INFINITY, evaluate
from debubble.search.annealing.incremental import SAME, START, common_mark, keep
from debubble.search.annealing.layout import FROM_SCRATCH, Ints, L
from debubble.search.annealing.moves import measure, move, recompute_otherwise, undo
from debubble.search.annealing.order_chain import OrderChain
from debubble.search.annealing.search import search
from debubble.search.annealing.shared_links import WHOLE, follow_list
from debubble.search.problem import OrderProblem
from tests.search.orders import uniform

MOVES = 400
SMALL = uniform(4, 10, offload=14, limit=8, backward_input=11, backward_weight=9)
CHUNKS = replace(uniform(8, 10, limit=8, backward_input=11, backward_weight=9), placement=Placement.v_shape(4))


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        replace(SMALL, costs=SMALL.costs.replace(host_link="half-duplex")),
        replace(SMALL, costs=SMALL.costs.replace(communication_model="exclusive")),
        replace(SMALL, offload=False),
        replace(SMALL, costs=SMALL.costs.replace(link_groups=[[0, 1], [2, 3]])),
        replace(SMALL, costs=SMALL.costs.replace(link_groups=[[1, 3]], host_link="half-duplex")),
        replace(SMALL, recompute=True),
        replace(SMALL, recompute=True, costs=SMALL.costs.replace(link_groups=[[0, 1], [2, 3]])),
        CHUNKS,
    ],
    ids=[
        "full duplex", "half duplex", "exclusive messages", "without offload", "shared links", "shared half duplex",
        "recomputation", "recomputation and shared links", "several chunks",
    ],
)  # fmt: skip
def test_an_evaluation_from_a_mark_equals_one_from_the_start(problem: OrderProblem) -> None:
    start = next(iter(search(problem, steps=0)))
    chain = OrderChain(problem, start, seed=3)
    a, x, n, _ = chain.arrays
    fresh = arrays_of(problem)
    operations = 7 * problem.stages * problem.micro_batches
    orders, lengths = encode(problem, start.schedule)
    random = np.array([77], dtype=np.int64)
    path = np.zeros(1, dtype=np.int64)
    value = evaluate(a, x, n, orders, lengths, INFINITY)
    keep(a, x, n, START)
    begins, meetings = set(), set()
    for turn in range(MOVES):
        tried, tried_lengths = orders.copy(), lengths.copy()
        pair, run = move(a, n, tried, tried_lengths, path, 0, problem.offload, problem.recompute, FROM_SCRATCH, random)
        at = common_mark(a, n, orders, lengths, tried, tried_lengths)
        if at == SAME:
            continue
        if run:
            at = recompute_otherwise(a, x, n, tried, tried_lengths, pair, run, at)
        threshold = INFINITY if turn % 2 else value
        found, at = measure(a, x, n, orders, lengths, tried, tried_lengths, at, threshold, INFINITY)
        begins.add(at)
        found = INFINITY if found > threshold else found
        meetings.add(n[a.marked + 2])
        assert found == evaluate(a, fresh.floats, fresh.ints, tried, tried_lengths, threshold)
        if found == INFINITY or turn % 3 == 0:
            undo(a, x, n, orders, lengths, pair, run)
            continue
        assert (chain.arrays.table("end", operations) == fresh.table("end", operations)).all()
        keep(a, x, n, at)
        orders, lengths, value = tried, tried_lengths, found
    assert len(begins) > 10
    # With shared links nothing is taken over from where the devices are in the state that they were in.
    assert len(meetings) == 1 if a.by_arrival else len(meetings) > 10


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("host_link", ["full-duplex", "half-duplex"])
def test_what_is_noted_around_a_change_is_what_is_noted_of_whole_lists(recompute: bool, host_link: str) -> None:
    long = uniform(4, 40, offload=14, limit=8, backward_input=11, backward_weight=9)
    costs = long.costs.replace(link_groups=[[0, 1], [2, 3]], host_link=host_link)
    problem = replace(long, costs=costs, recompute=recompute)
    a, x, n, _ = arrays_of(problem)
    fresh = arrays_of(problem)
    orders, lengths = encode(problem, next(iter(search(problem, steps=0))).schedule)
    random, path = np.array([77], dtype=np.int64), np.zeros(1, dtype=np.int64)

    def noted(numbers: Ints, orders: Ints, lengths: Ints) -> list[list[int]]:
        listed = np.concatenate([order[:length] for order, length in zip(orders, lengths, strict=True)])
        reloads = listed[listed >= L * problem.stages * problem.micro_batches]
        tables = [numbers[table + listed] for table in (a.follow, a.place, a.offload)]
        tables += [numbers[table + reloads] for table in (a.behind, a.freeing)]
        return [table.tolist() for table in (*tables, numbers[a.head : a.head + 3 * a.devices])]

    evaluate(a, x, n, orders, lengths, INFINITY)
    keep(a, x, n, START)
    before, short = noted(n, orders, lengths), 0
    for turn in range(MOVES):
        tried, tried_lengths = orders.copy(), lengths.copy()
        pair, run = move(a, n, tried, tried_lengths, path, 0, True, recompute, FROM_SCRATCH, random)
        at = common_mark(a, n, orders, lengths, tried, tried_lengths)
        if at == SAME:
            continue
        if run:
            at = recompute_otherwise(a, x, n, tried, tried_lengths, pair, run, at)
        found, at = measure(a, x, n, orders, lengths, tried, tried_lengths, at, INFINITY, INFINITY)
        if found < INFINITY:
            short += any(n[a.differs + d] >= 0 and n[a.noted_to + d] < WHOLE for d in range(a.devices))
            evaluate(a, fresh.floats, fresh.ints, tried, tried_lengths, INFINITY)
            assert noted(n, tried, tried_lengths) == noted(fresh.ints, tried, tried_lengths)
        if found < INFINITY and turn % 3:
            keep(a, x, n, at)
            orders, lengths = tried, tried_lengths
            before = noted(n, orders, lengths)
        else:
            undo(a, x, n, orders, lengths, pair, run)
            assert noted(n, orders, lengths) == before
    assert short > 50


def test_a_list_without_room_is_still_followed_to_its_end() -> None:
    # The next evaluation takes back the times of the whole list, although what it keeps may have changed meanwhile.
    problem = replace(SMALL, costs=SMALL.costs.replace(link_groups=[[0, 1], [2, 3]]))
    start = next(iter(search(problem, steps=0)))
    a, x, n, _ = arrays_of(problem)
    orders, lengths = encode(problem, start.schedule)
    x[a.limit] = 1.0
    assert not follow_list(a, x, n, orders, lengths[0], 0, 0, WHOLE)
    followed = []
    for head in n[a.head : a.head + 3].tolist():
        op = head
        while op >= 0:
            followed.append(op)
            op = int(n[a.follow + op])
    assert sorted(followed) == sorted(orders[0, : lengths[0]].tolist())


def test_lists_that_stay_late_are_given_up_and_were_mostly_worse() -> None:
    start = next(iter(search(SMALL, steps=0)))
    chain = OrderChain(SMALL, start, seed=0)
    a, x, n, _ = chain.arrays
    _, fresh_x, fresh_n, _ = arrays_of(SMALL)
    orders, lengths = encode(SMALL, start.schedule)
    random, path = np.array([5], dtype=np.int64), np.zeros(1, dtype=np.int64)
    value = evaluate(a, x, n, orders, lengths, INFINITY)
    keep(a, x, n, START)
    given_up = []
    for _ in range(10 * MOVES):
        tried, tried_lengths = orders.copy(), lengths.copy()
        move(a, n, tried, tried_lengths, path, 0, True, False, FROM_SCRATCH, random)
        at = common_mark(a, n, orders, lengths, tried, tried_lengths)
        if at < 0:
            continue
        found, _ = measure(a, x, n, orders, lengths, tried, tried_lengths, at, INFINITY, 1.0)
        exact = evaluate(a, fresh_x, fresh_n, tried, tried_lengths, INFINITY)
        undo(a, x, n, orders, lengths, 0, 0)
        assert found in (exact, INFINITY)
        if found != exact:
            given_up.append(exact)
    assert len(given_up) > 100
    assert sum(exact < value for exact in given_up) <= len(given_up) / 50
