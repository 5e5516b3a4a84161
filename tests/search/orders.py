"""Order problems of the tests of the solver: equal stages with one per device, or random costs."""

from typing import Any

from hypothesis import strategies as st

from debubble.ir import Placement, StageCosts
from debubble.search.problem import OrderProblem
from tests.strategies import stage_costs


def uniform(p: int, m: int, *, offload: int | None = None, limit: int | None = None, **changes: Any) -> OrderProblem:
    """A problem with F = I = W = 10, C = 1, and an activation of 2, of 1 after I; `changes` override costs.

    Activations may be offloaded in time `offload` if it is not None.
    """
    costs: dict[str, Any] = {
        "forward": 10, "backward_input": 10, "backward_weight": 10, "communication": 1, "activation": 2,
        "activation_after_input": 1, "offload": offload, "memory_limit": limit,
    }  # fmt: skip
    return OrderProblem(
        placement=Placement.linear(p),
        micro_batches=m,
        costs=StageCosts.of(stages=p, **(costs | changes)),
        offload=offload is not None,
    )


@st.composite
def offload_problems(draw: st.DrawFn, *, micro_batches: int) -> OrderProblem:
    """Problems of up to four different devices and up to `micro_batches`, with a limit that one activation fits."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, micro_batches))
    costs = draw(stage_costs(stages=p, offload=True)).with_limit(draw(st.integers(19, 60)))
    return OrderProblem(placement=Placement.linear(p), micro_batches=m, costs=costs, offload=True)
