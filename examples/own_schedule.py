"""A custom schedule: 1F1B with one more forward at the start on every device but the last.

`python examples/own_schedule.py` compares it with 1F1B where messages take time, and
`debubble simulate --schedule 1f1b,examples/own_schedule.py:eager` on the command line.
"""

import debubble as db
from debubble.schedules.registry import schedule


@schedule("eager-1f1b", paper="an example", bubble="that of 1f1b or less", memory="p - s + 1 on stage s")
def eager(*, devices: int, micro_batches: int, costs: db.StageCosts | None = None) -> db.Schedule:
    """One forward more than 1F1B before a stage's first backward (p - s + 1), then backwards and forwards in turn."""
    orders = []
    for s in range(devices):
        ahead = min(devices - s if s < devices - 1 else 0, micro_batches)
        order = [f"{s}F{j}" for j in range(ahead)]
        for j in range(micro_batches):
            order += [f"{s}F{ahead + j}"] * (ahead + j < micro_batches) + [f"{s}B{j}"]
        orders.append(order)
    return db.Schedule.of("eager-1f1b", db.Placement.linear(devices), micro_batches, orders)


if __name__ == "__main__":
    costs = db.StageCosts.of(stages=4, forward=1, backward_input=1, backward_weight=1, activation=1, communication=0.5)
    for name in ("1f1b", "eager-1f1b"):
        timeline = db.simulate(db.schedules[name](devices=4, micro_batches=8, costs=costs), costs)
        print(f"{name}: {timeline.makespan} per step, memory {timeline.peak_memory}")
