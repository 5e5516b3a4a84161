import pytest

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, InputError, Placement, StageCosts
from debubble.papers.optpipe.program.milp import solve_milp
from debubble.papers.optpipe.program.milp_model import MilpModel, Reductions
from debubble.planners import FixedStages, ModelUnits, Problem, planners
from debubble.search.effort import Effort, solver_of, status_of
from debubble.search.exact.cp_model import build, schedule_of
from debubble.search.problem import OrderProblem


def costs(p: int, **entries: object) -> StageCosts:
    base = {
        "activation": 2,
        "activation_after_input": 1,
        "activation_recomputed": 2,
        "offload": 1,
        "memory_limit": 4,
    }
    return StageCosts.of(stages=p, forward=2, backward_input=2, backward_weight=2, **{**base, **entries})  # type: ignore[arg-type]


def problem(p: int, m: int, effort: float, **entries: object) -> Problem:
    return Problem(devices=p, micro_batches=m, workload=FixedStages(costs(p, **entries)), effort=effort)


def test_a_small_problem_is_proven_optimal() -> None:
    result = planners["milp"](problem(3, 3, 10))
    assert result.makespan == result.lower_bound == 22
    assert result.solution.remark is not None
    assert result.solution.remark.endswith(
        "proves that none of its orders is faster, with 162 binary variables and 372 rows"
    )


def test_nothing_is_proven_if_recomputation_saves_memory() -> None:
    result = planners["milp"](problem(2, 2, 10, activation_recomputed=0))
    assert result.solution.lower_bound == 0


def test_a_program_that_is_too_large_for_the_effort_is_refused() -> None:
    with pytest.raises(InputError, match=r"of 8 devices and 32 micro-batches has about 114,688 rows: give"):
        planners["milp"](problem(8, 32, 10))


def test_ctrl_c_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("debubble.papers.optpipe.program.milp.solve_milp", interrupted)
    solution = planners["milp"].find(problem(3, 3, 10))
    assert solution.interrupted


def test_blocking_messages_are_refused() -> None:
    with pytest.raises(InputError, match="asynchronous messages"):
        planners["milp"](problem(2, 2, 10, communication_model="blocking"))


def test_units_are_partitioned_first() -> None:
    layer = Unit(
        type="dense", layer=None, forward=2, backward_input=2, backward_weight=2, static=1,
        strategies={"none": Strategy(4), "full": Strategy(1, 2)},
    )  # fmt: skip
    units = Units(units=(layer,) * 4, offload_bandwidth=2, memory_limit=(24,))
    result = planners["milp"](Problem(devices=2, micro_batches=2, workload=ModelUnits(units), effort=4))
    assert result.solution.partition is not None
    assert all(peak <= 24 for peak in result.timeline.peak_memory)


def test_a_problem_that_fits_no_device_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="nothing fits the memory limit"):
        planners["milp"](problem(2, 2, 10, memory_limit=1))


@pytest.mark.slow
def test_a_fixed_order_of_micro_batches_is_worse_with_offload() -> None:
    costs = StageCosts.of(
        stages=3, forward=[1, 2, 1], backward_input=[1, 3, 2], backward_weight=[3, 2, 1], activation=[2, 5, 2],
        activation_after_input=[1, 3, 1], offload=[5, 3, 3], reload=[5, 3, 3], memory_limit=[4, 11, 3],
    )  # fmt: skip
    problem = OrderProblem(placement=Placement.linear(3), micro_batches=4, costs=costs, offload=True)
    in_order = solve_milp(MilpModel(problem, Reductions(fixed_order=True)), effort=Effort(300))
    assert in_order.bound == pytest.approx(32)
    model, effort = build(problem, horizon=40), Effort(60)
    solver = solver_of(effort)
    assert status_of(solver, model.cp, effort) == "OPTIMAL"
    assert problem.value(schedule_of(model, solver.value)) == 31
