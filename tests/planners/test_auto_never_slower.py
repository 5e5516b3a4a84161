import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

import debubble as db
from debubble.costs import Strategy, Unit, Units
from debubble.costs.partition import Partition
from debubble.ir import DebubbleError
from debubble.planners import planners
from debubble.planners.joint.orders import improved_order
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.schedules import schedules
from debubble.simulator import simulate


def random_problem(seed: int) -> Problem:
    """A problem of units or fixed stages on two to four devices, with memory for some of the activations."""
    chance = random.Random(seed)
    devices, micro_batches = chance.randint(2, 4), chance.randint(2, 8)
    times = [chance.randint(1, 6) for _ in range(3)]
    if seed % 2:
        costs = db.StageCosts.of(
            stages=devices, forward=times[0], backward_input=times[1], backward_weight=times[2], activation=4,
            recompute=times[0], offload=chance.choice([None, 3, 9]), communication=chance.randint(0, 2),
            memory_limit=chance.randint(6, 20),
        )  # fmt: skip
        workload: FixedStages | ModelUnits = FixedStages(costs)
    else:
        unit = Unit(
            type="layer", layer=None, forward=times[0], backward_input=times[1], backward_weight=times[2], static=2,
            strategies={"none": Strategy(4), "full": Strategy(1, times[0])}, activation_after_input=2,
        )  # fmt: skip
        workload = ModelUnits(
            Units(
                units=(unit,) * chance.randint(2 * devices, 4 * devices),
                communication=chance.randint(0, 2),
                offload_bandwidth=chance.choice([None, 1, 3]),
                link_groups=chance.choice([(), ((0, 1),)]),
                memory_limit=(chance.randint(16, 60),),
            )
        )
    return Problem(
        workload=workload, devices=devices, micro_batches=micro_batches, effort=0.2, seed=seed, compare=True,
        plain=False,
    )  # fmt: skip


def times_of_schedules(problem: Problem) -> Iterator[tuple[str, int, float]]:
    """Name, chunks and step of every schedule that fits, with all stages recomputing where it would not fit otherwise.

    The stages are the fixed ones, or an even split of the units.
    """
    max_chunks = len(problem.units.units) // problem.devices if isinstance(problem.workload, ModelUnits) else 1
    for name, entry in schedules.items():
        for chunks in range(1, max_chunks + 1) if "chunks" in entry.options else (entry.default_chunks,):
            for recomputing in (False, True):
                try:
                    yield name, chunks, time_of_schedule(problem, name, chunks, recomputing=recomputing)
                except DebubbleError:
                    continue
                break


def time_of_schedule(problem: Problem, name: str, chunks: int, *, recomputing: bool) -> float:
    """The step of a schedule with its default options; raises DebubbleError if it does not fit or cannot run."""
    entry, stages = schedules[name], problem.devices * chunks
    build = partial(entry, devices=problem.devices, micro_batches=problem.micro_batches)
    match problem.workload:
        case FixedStages(costs):
            pass
        case ModelUnits(units):
            placement = build(**entry.accepted_options(chunks=chunks, tries=1)).placement
            partition = Partition.cut(units, even_counts(units, stages), strategy="full" if recomputing else "none")
            costs = units.stage_costs(partition, placement)
    schedule = build(costs=costs, **entry.accepted_options(chunks=chunks))
    fused = schedule.fused_recompute | (frozenset(range(stages)) if recomputing else frozenset())
    return float(problem.step_time(simulate(replace(schedule, fused_recompute=fused), costs)))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(2, 300)))])
def test_no_planner_and_no_schedule_is_faster_than_auto(seed: int) -> None:
    """If auto finds no plan, nothing fits."""
    problem = random_problem(seed)
    try:
        best = planners["auto"](problem)
    except DebubbleError:
        for name, entry in planners.items():
            if not entry.searches:
                with pytest.raises(DebubbleError):
                    planners[name](problem)
        assert not [*times_of_schedules(problem)]
        return
    for name in planners:
        if name != "auto":
            try:
                other = planners[name](problem)
            except DebubbleError:
                continue
            assert best.time <= other.time
    assert not [faster for faster in times_of_schedules(problem) if faster[-1] < best.time]


def test_the_order_search_improves_on_a_given_solution() -> None:
    costs = db.StageCosts.of(stages=4, forward=2, backward_input=2, backward_weight=2, communication=1)
    problem = Problem(workload=FixedStages(costs), devices=4, micro_batches=8, effort=5)
    begun = planners["dapple"](problem)
    *_, further = improved_order(problem, begun.solution, problem.begun())
    # Split backwards fill a bubble of 1F1B; no order takes less than 57.
    assert begun.time > db.simulate(further.schedule, further.costs).makespan >= 57


@pytest.mark.slow
def test_a_stage_without_memory_for_r_recomputes_fused() -> None:
    # A fused recomputation restores 1 at a time; an R restores all 3, which do not fit on the second device.
    costs = db.StageCosts.of(
        stages=2, recompute=1, activation=4, activation_recomputed=1, activation_after_input=2, recompute_workspace=1,
        memory_limit=(8, 3),
    )  # fmt: skip
    problem = Problem(workload=FixedStages(costs), devices=2, micro_batches=4, effort=1)
    recomputing = replace(db.schedules["1f1b"](devices=2, micro_batches=4), fused_recompute=frozenset({0, 1}))
    *_, further = improved_order(problem, Solution(schedule=recomputing, costs=costs), problem.begun())
    assert further.schedule.fused_recompute == {1}


def test_the_order_search_skips_blocking_communication() -> None:
    costs = db.StageCosts.of(stages=2, communication=1, communication_model="blocking")
    problem = Problem(workload=FixedStages(costs), devices=2, micro_batches=4, effort=1)
    assert not [*improved_order(problem, planners["dapple"](problem).solution, problem.begun())]
