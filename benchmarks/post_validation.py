"""What post-validation gains: steps of real programs, messages and tallies, with sleeping compute.

    python benchmarks/post_validation.py [--steps 6] [--unit 0.02] [--output benchmarks/results/post_validation.json]

Every schedule runs its steps on threads, an operation of one unit of time sleeping that long: synchronous steps, where
all devices wait for the norm before the next begins, and post-validated ones, where the norm is handed on and comes
back before the next step's first backward.  A synchronous step should take the makespan, a post-validated one the
span.  Sleeping takes no core, so any machine will do.
"""

import argparse
import json
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from provenance import measured_by

import debubble as db
from debubble.ir import PlannedUnit
from debubble.plans import Plan
from debubble.runtime.distributed.gradient_norm import NormRelay, PartialSums, finish_order
from debubble.runtime.distributed.transport import Threads
from debubble.runtime.execution.speculation import SpeculativeInterpreter
from debubble.training.rehearsal import SleepingOperations, messages, scaled

DEVICES, MICRO_BATCHES = 4, 8
CASES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds that a unit of time takes")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "post_validation.json")
    given = parser.parse_args()
    rows = []
    for name in CASES:
        plan = plan_of(name)
        timeline = plan.simulate()
        together, ahead = (
            seconds_per_step(plan, steps=given.steps, unit=given.unit, waits=waits) / given.unit
            for waits in (True, False)
        )
        rows.append(
            {
                "schedule": name,
                "makespan": float(timeline.makespan),
                "span": float(timeline.span),
                "synchronous": round(together, 2),
                "post_validated": round(ahead, 2),
            }
        )
        print(rows[-1], flush=True)
    settings = {"devices": DEVICES, "micro_batches": MICRO_BATCHES, "steps": given.steps, "unit_seconds": given.unit}
    given.output.write_text(json.dumps({**measured_by(), **settings, "rows": rows}, indent=1) + "\n")


def plan_of(name: str) -> Plan:
    """F = I = W = 1 per device."""
    chunks = 2 if name in ("zb-v", "interleaved") else 1
    stages = DEVICES * chunks
    costs = db.StageCosts.of(
        stages=stages, forward=1 / chunks, backward_input=1 / chunks, backward_weight=1 / chunks, activation=1
    )
    schedule = db.schedules[name](devices=DEVICES, micro_batches=MICRO_BATCHES, costs=costs)
    return Plan(
        planner="benchmark",
        schedule=schedule,
        costs=costs,
        lower_bound=0,
        partition=tuple((PlannedUnit("stage", s),) for s in range(stages)),
    )


def seconds_per_step(plan: Plan, *, steps: int, unit: float, waits: bool) -> float:
    """Of the steps after the first, on the device that takes longest; `waits`: for all others, after each."""
    slow = scaled(plan, unit)
    program = db.lower(slow.schedule, slow.costs)

    def work(transport: Threads) -> float:
        interpreter = SpeculativeInterpreter(SleepingOperations.of(program, transport))
        relay = NormRelay(transport, finish_order(program))
        ends: list[float] = []
        whole: Future[PartialSums] | None = None
        for _ in range(steps):
            interpreter.run_ahead(messages(plan), is_valid=partial(known, whole))
            ends.append(time.perf_counter())
            _, whole = relay.take_turn(PartialSums(squares=1.0), steps_ahead=lambda _: True)
            if waits:
                whole.result()
        known(whole)
        return (ends[-1] - ends[0]) / (steps - 1)

    seconds: list[float] = Threads.run(plan.devices, work)
    return max(seconds)


def known(total: Future[PartialSums] | None) -> bool:
    """Wait for the total of the step before, if there is one, with which that step always stands."""
    return total is None or total.result() is not None


if __name__ == "__main__":
    main()
