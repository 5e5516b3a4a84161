"""The first device alone, counted in slots: a bound that holds, and that sees what areas do not."""

from __future__ import annotations

import pytest

from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort
from debubble.search.exact.time_indexed_bound import Prover, running_prover
from debubble.search.optimize import optimize
from debubble.search.problem import OrderProblem
from tests.search.orders import uniform


def proved(problem: OrderProblem, *, below: int = 1900) -> float:
    prover = Prover(problem, bound=lower_bound(problem), below=below)
    prover.run(Effort(60))
    return float(prover.bound)


@pytest.mark.parametrize("duplex", ["full-duplex", "half-duplex"])
@pytest.mark.parametrize(
    ("p", "m", "offload", "limit"),
    [
        (3, 4, 20, 4),
        (2, 5, 20, 3),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(3, 4, 30, 4), (4, 4, 40, 4)]),
    ],
)
def test_no_optimum_is_below_it(p: int, m: int, offload: int, limit: int, duplex: str) -> None:
    problem = uniform(p, m, offload=offload, limit=limit, communication=0, host_link=duplex)
    *_, best = optimize(problem, effort=60)
    assert best.optimal
    assert lower_bound(problem) <= proved(problem) <= float(best.value)


def test_the_bound_sees_that_a_slow_link_leaves_too_few_places() -> None:
    problem = uniform(8, 8, offload=40, limit=8, communication=0)
    assert proved(problem) > float(lower_bound(problem)) + 30


def test_the_bound_stops_below_what_was_found() -> None:
    problem = uniform(8, 8, offload=40, limit=8, communication=0)
    bound = lower_bound(problem)
    assert proved(problem, below=int(bound) + 10) <= float(bound) + 20


def test_a_prover_can_be_stopped() -> None:
    problem = uniform(8, 32, offload=40, limit=8, communication=0)
    with running_prover(problem, bound=1054, below=1300, effort=Effort(600)) as prover:
        pass
    assert prover.bound >= 1054


def test_problems_that_it_is_not_for_keep_their_bound() -> None:
    problem = uniform(3, 4, offload=20, limit=4, communication=0)
    whole = OrderProblem(placement=problem.placement, micro_batches=4, costs=problem.costs, split=False, offload=True)
    assert proved(whole) == float(lower_bound(whole))
