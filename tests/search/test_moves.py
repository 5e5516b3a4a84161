import pytest

from debubble.ir import Op, Placement, StageCosts
from debubble.search.annealing.arrays import arrays_of, decode, encode
from debubble.search.annealing.layout import KINDS
from debubble.search.annealing.moves import exchange
from debubble.search.problem import OrderProblem

PROBLEM = OrderProblem(placement=Placement((0, 0)), micro_batches=2, costs=StageCosts.of(stages=2))
ORDER = "0F0 1F0 0F1 1F1 1I0 0I0 1W0 0W0 1I1 0I1 1W1 0W1"


def exchanged(op: str, by: int) -> str:
    """The list of the only device once an operation and the one `by` places away were to change places."""
    a, _, n, _ = arrays_of(PROBLEM)
    orders, lengths = encode(PROBLEM, PROBLEM.schedule([map(Op.parse, ORDER.split())]))
    moved = Op.parse(op)
    number = (KINDS.index(moved.kind) * a.stages + moved.stage) * a.micro_batches + moved.micro_batch
    exchange(a, n, orders, lengths, number, by)
    return " ".join(each.name for each in decode(PROBLEM, orders, lengths, name="moved").orders[0])


def test_two_operations_change_places_over_those_between() -> None:
    assert exchanged("1W0", 2) == "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0W0 1W0 0I1 1W1 0W1"
    assert exchanged("1I1", -2) == exchanged("1W0", 2)


@pytest.mark.parametrize(
    ("op", "by"),
    [("1W0", 4), ("0I0", 3), ("0W1", 1), ("0F0", -1)],
    ids=["its own kind", "its own micro-batch", "the end of the list", "the beginning of the list"],
)
def test_no_operation_passes(op: str, by: int) -> None:
    assert exchanged(op, by) == ORDER
