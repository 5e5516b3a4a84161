import pytest

from debubble.ir import Op, Placement, StageCosts
from debubble.search.annealing.arrays import arrays_of, decode, encode
from debubble.search.annealing.layout import KINDS
from debubble.search.annealing.moves import exchange
from debubble.search.problem import OrderProblem

PROBLEM = OrderProblem(placement=Placement((0, 0)), micro_batches=2, costs=StageCosts.of(stages=2))
ORDER = "0F0 1F0 0F1 1F1 1I0 0I0 1W0 0W0 1I1 0I1 1W1 0W1"


def exchanged(op: str, by: int) -> str:
    """The device's list after an attempt to exchange `op` with the operation `by` positions away."""
    a, _, n, _ = arrays_of(PROBLEM)
    orders, lengths = encode(PROBLEM, PROBLEM.schedule([map(Op.parse, ORDER.split())]))
    moved = Op.parse(op)
    number = (KINDS.index(moved.kind) * a.stages + moved.stage) * a.micro_batches + moved.micro_batch
    exchange(a, n, orders, lengths, number, by)
    return " ".join(operation.name for operation in decode(PROBLEM, orders, lengths, name="moved").orders[0])


def test_operations_are_exchanged_across_those_in_between() -> None:
    assert exchanged("1W0", 2) == "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0W0 1W0 0I1 1W1 0W1"
    assert exchanged("1I1", -2) == exchanged("1W0", 2)


@pytest.mark.parametrize(
    ("op", "by"),
    [("1W0", 4), ("0I0", 3), ("0W1", 1), ("0F0", -1)],
    ids=["same kind", "same micro-batch", "end of the list", "beginning of the list"],
)
def test_an_exchange_across_a_barrier_is_rejected(op: str, by: int) -> None:
    assert exchanged(op, by) == ORDER
