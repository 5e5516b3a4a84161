"""OptPipe's MILP: Figure 3's ordering variables, the effect of the reductions, and optima."""

from __future__ import annotations

import math
from fractions import Fraction

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.papers.drawings import Cells
from debubble.papers.optpipe.program.milp import solve_milp
from debubble.papers.optpipe.program.milp_model import COMPUTE, MilpModel, Reductions
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Table
from debubble.schedules import schedules
from debubble.search.effort import Effort
from debubble.search.optimize import optimize
from debubble.search.problem import OrderProblem

PAPER = PrintedPaper.load("optpipe")

KINDS = {
    "decided by the solver": "#3d7ab8",
    "complement of another": "#c3cad6",
    "same micro-batch or kind": "#f1f3f7",
    "follows by transitivity": "#cbb9e4",
    "the operation itself": "#5b6573",
}
VARIANTS = {
    "all reductions": Reductions(),
    "both directions": Reductions(one_direction=False),
    "without transitivity": Reductions(transitive=False),
    "micro-batches in any order": Reductions(fixed_order=False),
    "triangles as rows": Reductions(triangles="eager"),
    "violated triangles": Reductions(triangles="lazy"),
}


def problem(micro_batches: int = 4) -> OrderProblem:
    """A problem of three devices with memory for two activations."""
    costs = StageCosts.of(
        stages=3, forward=2, backward_input=2, backward_weight=2, activation=2, activation_after_input=1, offload=1,
        memory_limit=4,
    )  # fmt: skip
    return OrderProblem(placement=Placement.linear(3), micro_batches=micro_batches, costs=costs, offload=True)


def figure_3() -> Cells:
    """Figure 3: the pairs of one stage's operations, by what determines their order."""
    model = MilpModel(problem())
    operations = [Op(kind, 0, j) for kind in COMPUTE for j in range(4)]
    known = model.precedes

    def kind_of(row: int, column: int) -> str:
        a, b = operations[row], operations[column]
        if a == b:
            return "the operation itself"
        if isinstance(known[a, b], int):
            same = a.micro_batch == b.micro_batch or a.kind is b.kind
            return "same micro-batch or kind" if same else "follows by transitivity"
        return "decided by the solver" if row < column else "complement of another"

    labels = [f"{_LETTERS[op.kind]}{op.micro_batch}" for op in operations]
    indices = range(len(operations))
    return Cells(
        title="Figure 3: order of two operations of one stage, m = 4",
        labels=labels,
        cells=[[kind_of(row, column) for column in indices] for row in indices],
        colors=KINDS,
    )


_LETTERS = {Kind.F: "F", Kind.I: "B", Kind.W: "W"}


def reductions() -> Table:
    """Section 4.1: the MILP's size, the bound of its relaxation, and the work until optimality is proven."""
    rows: list[tuple[Cell, ...]] = []
    for name, variant in VARIANTS.items():
        model = MilpModel(problem(), variant)
        bound = model.relaxation()
        rows.append((name, model.binaries, model.rows, round(bound, 2), *_work(variant)))
    smaller = problem(SOLVED_MICRO_BATCHES)
    start = schedules["adaoffload"](devices=3, micro_batches=SOLVED_MICRO_BATCHES, costs=smaller.costs)
    rows.append((WARM_START, *rows[0][1:4], *_work(Reductions(), start)))
    return PAPER.table("reductions", rows, solved=SOLVED_MICRO_BATCHES)


INSTANCES = ((1, 0, 2, 1), (5, 1, Fraction(3, 2), 5), (1, Fraction(1, 5), Fraction(3, 2), 1))
"""(T_F = T_B = T_W, T_comm, activations that fit, T_offload) on 3 devices with 3 micro-batches."""


def optima() -> Table:
    """The MILP's optima, compared with optima that the search proves by CP-SAT and its bounds."""
    rows: list[tuple[Cell, ...]] = []
    for time, message, limit, offload in INSTANCES:
        costs = StageCosts.of(
            stages=3, forward=time, backward_input=time, backward_weight=time, activation=1,
            activation_after_input=Fraction(1, 2), communication=message, offload=offload, memory_limit=limit,
        )  # fmt: skip
        instance = OrderProblem(placement=Placement.linear(3), micro_batches=3, costs=costs, offload=True)
        result = solve_milp(MilpModel(instance), effort=Effort(math.inf))
        assert result.incumbent is not None, "something fits"
        *_, best = optimize(instance, effort=20.0)
        proven = float(best.value) if best.optimal else None
        rows.append((*map(float, (time, message, limit, offload)), float(result.incumbent.value), proven))
    return PAPER.table("optima", rows)


WARM_START = "all, from AdaOffload's schedule"
SOLVED_MICRO_BATCHES = 3
"""Micro-batches of the MILP that is solved with every variant."""


def _work(variant: Reductions, start: Schedule | None = None) -> tuple[int, int]:
    """Nodes and simplex iterations until optimality is proven."""
    answer = solve_milp(MilpModel(problem(SOLVED_MICRO_BATCHES), variant), effort=Effort(math.inf), start=start)
    return answer.nodes, answer.iterations
