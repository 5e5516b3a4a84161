import math

import debubble as db
from debubble.ir import RunOptions
from debubble.ir.degrees import Degrees, DegreeValue
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.other_values import other_values
from debubble.planners.degrees.search import search_degrees
from debubble.planners.degrees.space import Job, configurations

ONE, TWO, FOUR = (Degrees(tensor=tensor, data=4 // tensor) for tensor in (1, 2, 4))


def told(
    legal: list[Degrees], steps: dict[Degrees, float], bounds: dict[Degrees, float] | None = None
) -> tuple[DegreeValue, ...]:
    return other_values(ONE, legal, steps=steps, bounds=bounds or {}, too_large=())


def test_each_other_value_has_its_best_step() -> None:
    larger = Degrees(tensor=2, data=2, micro_batch_size=2)
    found = told([ONE, TWO, larger], {ONE: 1.0, TWO: 2.5, larger: 2.0})
    assert found == (
        DegreeValue(degree="tensor", value=2, step_time=2.0),
        DegreeValue(degree="micro_batch_size", value=2, step_time=2.0),
    )


def test_a_pruned_choice_has_a_bound_where_it_may_be_faster() -> None:
    larger = Degrees(tensor=2, data=2, micro_batch_size=2)
    values = {each.value: each for each in told([ONE, TWO, larger], {ONE: 1.0, TWO: 2.5}, {larger: 2.0})}
    assert values[2] == DegreeValue(degree="micro_batch_size", value=2, lower_bound=2.0)
    tensor = told([ONE, TWO, larger], {ONE: 1.0, TWO: 1.5}, {larger: 2.0})[0]
    assert (tensor.step_time, tensor.lower_bound) == (1.5, None)


def test_a_value_of_which_nothing_fits_has_neither() -> None:
    assert told([ONE, FOUR], {ONE: 1.0}) == (DegreeValue(degree="tensor", value=4),)
    impossible = other_values(ONE, [ONE, FOUR], steps={ONE: 1.0}, bounds={}, too_large={FOUR})
    assert impossible == (DegreeValue(degree="tensor", value=4, too_large=True),)


def test_no_quick_plan_of_another_value_is_faster_than_is_said() -> None:
    job = Job(
        model=db.models["llama-tiny"], cluster=db.Cluster.parse("4xA100-80GB"), global_batch=4, effort=1,
        options=RunOptions(sequence_length=128), fixed={"context": 1},
    )  # fmt: skip
    values = search_degrees(job).search.other_values
    assert {each.degree for each in values} >= {"pipeline", "tensor", "zero", "micro_batch_size"}
    for each in values:
        steps = [math.inf]
        for degrees in configurations(job):
            if getattr(degrees, each.degree) == each.value:
                try:
                    steps.append(quick_step(job.problem(degrees))[0])
                except db.DebubbleError:
                    continue
        said = each.step_time or each.lower_bound or math.inf
        assert said <= min(steps) * (1 + 1e-9)
