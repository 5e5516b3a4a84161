from dataclasses import replace

import numpy as np
import pytest

from debubble.ir import Placement
from debubble.search.annealing.arrays import arrays_of, encode
from debubble.search.annealing.evaluate import evaluate
from debubble.search.annealing.incremental import SAME, START, accept, last_common_mark
from debubble.search.annealing.layout import FROM_SCRATCH
from debubble.search.annealing.moves import evaluate_from_mark, move, undo, update_recompute
from debubble.search.annealing.order_chain import OrderChain
from debubble.search.annealing.rules import INFINITY
from debubble.search.annealing.search import search
from debubble.search.problem import OrderProblem
from tests.search.orders import uniform

MOVES = 400
SMALL = uniform(4, 10, offload=14, limit=8, backward_input=11, backward_weight=9)
LONG = uniform(4, 40, offload=14, limit=8, backward_input=11, backward_weight=9)
CHUNKS = replace(uniform(8, 10, limit=8, backward_input=11, backward_weight=9), placement=Placement.v_shape(4))


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        replace(SMALL, costs=SMALL.costs.replace(communication_model="exclusive", host_link="half-duplex")),
        replace(LONG, costs=LONG.costs.replace(link_groups=[[1, 3]], host_link="half-duplex")),
        replace(LONG, recompute=True, costs=LONG.costs.replace(link_groups=[[0, 1], [2, 3]])),
        CHUNKS,
    ],
    ids=["full duplex", "exclusive half duplex", "shared half duplex", "shared links, recomputed", "chunks"],
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
    accept(a, x, n, START)
    begins, meetings = set(), set()
    for turn in range(MOVES):
        tried, tried_lengths = orders.copy(), lengths.copy()
        pair, run = move(a, n, tried, tried_lengths, path, 0, problem.offload, problem.recompute, FROM_SCRATCH, random)
        mark = last_common_mark(a, n, orders, lengths, tried, tried_lengths)
        if mark == SAME:
            continue
        if run:
            mark = update_recompute(a, x, n, tried, tried_lengths, pair, run, mark)
        threshold = INFINITY if turn % 2 else value
        result, mark = evaluate_from_mark(a, x, n, orders, lengths, tried, tried_lengths, mark, threshold, INFINITY)
        begins.add(mark)
        result = INFINITY if result > threshold else result
        meetings.add(n[a.mark_counts + 2])
        assert result == evaluate(a, fresh.floats, fresh.ints, tried, tried_lengths, threshold)
        if result == INFINITY or turn % 3 == 0:
            undo(a, x, n, orders, lengths, pair, run)
            continue
        assert (chain.arrays.table("end", operations) == fresh.table("end", operations)).all()
        accept(a, x, n, mark)
        orders, lengths, value = tried, tried_lengths, result
    assert len(begins) > 10
    # With shared links, the evaluation never reuses times after a state that equals the previous one.
    assert len(meetings) == 1 if a.by_arrival else len(meetings) > 10


@pytest.mark.slow
def test_lists_that_are_abandoned_early_are_mostly_worse() -> None:
    start = next(iter(search(SMALL, steps=0)))
    chain = OrderChain(SMALL, start, seed=0)
    a, x, n, _ = chain.arrays
    _, fresh_x, fresh_n, _ = arrays_of(SMALL)
    orders, lengths = encode(SMALL, start.schedule)
    random, path = np.array([5], dtype=np.int64), np.zeros(1, dtype=np.int64)
    value = evaluate(a, x, n, orders, lengths, INFINITY)
    accept(a, x, n, START)
    abandoned = []
    for _ in range(4 * MOVES):
        tried, tried_lengths = orders.copy(), lengths.copy()
        move(a, n, tried, tried_lengths, path, 0, True, False, FROM_SCRATCH, random)
        mark = last_common_mark(a, n, orders, lengths, tried, tried_lengths)
        if mark < 0:
            continue
        result, _ = evaluate_from_mark(a, x, n, orders, lengths, tried, tried_lengths, mark, INFINITY, 1.0)
        exact = evaluate(a, fresh_x, fresh_n, tried, tried_lengths, INFINITY)
        undo(a, x, n, orders, lengths, 0, 0)
        assert result in (exact, INFINITY)
        if result != exact:
            abandoned.append(exact)
    assert len(abandoned) > 40
    assert sum(exact < value for exact in abandoned) <= len(abandoned) / 50
