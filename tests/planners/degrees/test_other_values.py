import math

import debubble as db
from debubble.ir import RunOptions
from debubble.ir.degrees import Degrees, DegreeValue
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.other_values import other_values
from debubble.planners.degrees.search import search_degrees
from debubble.planners.degrees.space import Job, configurations

ONE, TWO, FOUR = (Degrees(tensor=tensor, data=4 // tensor) for tensor in (1, 2, 4))


def values_of(
    legal: list[Degrees], steps: dict[Degrees, float], bounds: dict[Degrees, float] | None = None
) -> tuple[DegreeValue, ...]:
    return other_values(ONE, legal, steps=steps, bounds=bounds or {}, too_large=())


def test_each_other_value_has_its_best_step() -> None:
    larger = Degrees(tensor=2, data=2, micro_batch_size=2)
    values = values_of([ONE, TWO, larger], {ONE: 1.0, TWO: 2.5, larger: 2.0})
    assert values == (
        DegreeValue(degree="tensor", value=2, step_time=2.0),
        DegreeValue(degree="micro_batch_size", value=2, step_time=2.0),
    )


def test_a_pruned_choice_has_a_bound_where_it_may_be_faster() -> None:
    larger = Degrees(tensor=2, data=2, micro_batch_size=2)
    values = {value.value: value for value in values_of([ONE, TWO, larger], {ONE: 1.0, TWO: 2.5}, {larger: 2.0})}
    assert values[2] == DegreeValue(degree="micro_batch_size", value=2, lower_bound=2.0)
    tensor = values_of([ONE, TWO, larger], {ONE: 1.0, TWO: 1.5}, {larger: 2.0})[0]
    assert (tensor.step_time, tensor.lower_bound) == (1.5, None)


def test_a_value_that_never_fits_has_no_step_and_no_bound() -> None:
    assert values_of([ONE, FOUR], {ONE: 1.0}) == (DegreeValue(degree="tensor", value=4),)
    impossible = other_values(ONE, [ONE, FOUR], steps={ONE: 1.0}, bounds={}, too_large={FOUR})
    assert impossible == (DegreeValue(degree="tensor", value=4, too_large=True),)


def test_no_quick_plan_is_faster_than_the_reported_step() -> None:
    job = Job(
        model=db.models["llama-tiny"], cluster=db.Cluster.parse("4xA100-80GB"), global_batch=4, effort=1,
        options=RunOptions(sequence_length=128), fixed={"context": 1},
    )  # fmt: skip
    values = search_degrees(job).search.other_values
    assert {value.degree for value in values} >= {"pipeline", "tensor", "zero", "micro_batch_size"}
    for value in values:
        steps = [math.inf]
        for degrees in configurations(job):
            if getattr(degrees, value.degree) == value.value:
                try:
                    steps.append(quick_step(job.problem(degrees))[0])
                except db.DebubbleError:
                    continue
        promised = value.step_time or value.lower_bound or math.inf
        assert promised <= min(steps) * (1 + 1e-9)
