"""Instructions per second of lowering, simulation and pricing: interleaved 1F1B on 16 devices, 512 micro-batches.

    python benchmarks/simulation.py [--devices 16] [--micro-batches 512] [--chunks 4] [--repeat 5] [--json FILE]

All times are the process's own seconds of one core: its neighbours on the machine are not counted, though they lengthen
them.  `first` is that of lowering and simulation together when a process does them for the first time.  All other
numbers are the fastest of `repeat` runs once everything is loaded.  `offload` lists an O and an L for every micro-batch
of the first chunk.  Simulation includes makespan, span and peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from provenance import measured_by

import debubble as db
from debubble.ir import Kind, Op, Schedule, StageCosts, lower
from debubble.simulator import Repricer, Timeline, simulate


def with_offload(schedule: Schedule) -> Schedule:
    """The schedule, its first chunk's activations offloaded at once and reloaded one compute operation ahead."""
    return replace(schedule, orders=tuple(offloading(order, schedule.devices) for order in schedule.orders))


def offloading(order: tuple[Op, ...], devices: int) -> tuple[Op, ...]:
    result: list[Op] = []
    for op in order:
        if op.stage < devices and op.kind is Kind.B:
            result.insert(len(result) - 1, Op(Kind.L, op.stage, op.micro_batch))
        result.append(op)
        if op.stage < devices and op.kind is Kind.F:
            result.append(Op(Kind.O, op.stage, op.micro_batch))
    return tuple(result)


def figures(timeline: Timeline) -> tuple[object, ...]:
    return timeline.makespan, timeline.span, timeline.peak_memory


def fastest(run: Callable[[], object], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measured(schedule: Schedule, costs: StageCosts, repeat: int) -> dict[str, Any]:
    start = time.process_time()
    program = lower(schedule, costs)
    figures(simulate(program))
    first = round(time.process_time() - start, 4)
    repricer = Repricer(schedule)
    repricer.price(costs)
    # A schedule of its own each time: it keeps what was derived from its lists.
    seconds = {
        "lowering": fastest(lambda: lower(replace(schedule), costs), repeat),
        "simulation": fastest(lambda: figures(simulate(replace(program))), repeat),
        "pricing": fastest(lambda: repricer.price(costs), repeat),
    }
    count = len(program.kind)
    rates = {name: round(count / s) for name, s in seconds.items()}
    together = round(seconds["lowering"] + seconds["simulation"], 4)
    rounded = {name: round(s, 4) for name, s in seconds.items()}
    return {"instructions": count, "per_second": rates, "seconds": rounded, "together": together, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("devices", 16), ("micro-batches", 512), ("chunks", 4), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json")
    given = parser.parse_args()
    schedule = db.schedules["interleaved"](
        devices=given.devices, micro_batches=given.micro_batches, chunks=given.chunks
    )
    costs = StageCosts.of(stages=schedule.stages, communication=1, offload=1)
    result = {**measured_by(), "load": round(os.getloadavg()[0], 1), "plain": measured(schedule, costs, given.repeat)}
    result["offload"] = measured(with_offload(schedule), costs, given.repeat)
    for name in ("plain", "offload"):
        rates = "  ".join(f"{what} {rate:>12,}" for what, rate in result[name]["per_second"].items())
        print(f"{name:8}{result[name]['instructions']:>9,} instructions, per second: {rates}")
        print(
            f"{'':8}lowering and simulation: {result[name]['together']} s; for the first time {result[name]['first']} s"
        )
    if given.json:
        with open(given.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
