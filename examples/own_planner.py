"""A custom planner: the fastest of a hundred random partitions that fit, under 1F1B.

`python examples/own_planner.py` compares it with AdaPipe, and `debubble plan llama2-7b --cluster 4xA100-80GB --planner
examples/own_planner.py:random_stages` plans with it.  In a package of yours an entry point in the group
`debubble.planners` makes `--planner random-stages` find it.
"""

import random

import debubble as db
from debubble.costs.partition import Partition
from debubble.planners import ModelUnits, Problem, Solution
from debubble.planners.registry import planner


@planner("random-stages", paper="an example")
def random_stages(problem: Problem) -> Solution:
    """Cut the units at random places; the verifier simulates the result, so no plan can claim too much."""
    if not isinstance(problem.workload, ModelUnits):
        raise db.InputError("random-stages cuts the units of a model, or of --units.")
    units, draw = problem.workload.units, random.Random(problem.seed)
    schedule = db.schedules["1f1b"](devices=problem.devices, micro_batches=problem.micro_batches)
    fits = []
    for _ in range(100):
        cuts = sorted(draw.sample(range(1, len(units.units)), problem.devices - 1))
        partition = Partition.cut(units, [b - a for a, b in zip([0, *cuts], [*cuts, len(units.units)], strict=True)])
        costs = units.stage_costs(partition, schedule.placement)
        try:
            time = db.simulate(schedule, costs).makespan
        except db.InfeasibleError:
            continue
        fits.append((time, Solution(schedule=schedule, costs=costs, partition=partition)))
    if not fits:
        raise db.InfeasibleError("None of a hundred random partitions fits.")
    return min(fits, key=lambda fit: fit[0])[1]


if __name__ == "__main__":
    for name in ("random-stages", "adapipe"):
        plan = db.plan(db.models["llama2-7b"], db.Cluster.parse("4xA100-80GB"), micro_batches=16, planner=name)
        print(f"{name}: {plan.simulate().makespan:.3f} s")
