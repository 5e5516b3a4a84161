"""Searches beside a training run: `python -m debubble.training.online.scheduler FOLDER EFFORT`.

It reads `plan.json` in the folder, whose costs are the measured ones, and replaces `found.json` whenever it has found a
faster order of the same stages.  It imports no torch, computes with one thread, and ends when its parent does.

Only orders that add up floating-point numbers as the plan does are taken, so that losses stay the same bit for bit:
every operator computes the same from the same inputs whenever it runs, and a split backward computes what a whole one
does. All that an order of operations could change is the order of sums.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from debubble.errors import InputError
from debubble.files import write_whole
from debubble.ir import Kind, Plan, Schedule
from debubble.ir.plan_file import PlanFile
from debubble.models import Model

Terms = list[tuple[str, int]]


def summation(plan: Plan, schedule: Schedule) -> dict[str, Terms]:
    """Sums of floating-point numbers in a step of the schedule, each with its terms in order.

    A stage's linear operators add their gradients in its B or W, all others in its B or I; a tied table on one device
    gets both from two stages; the last stage adds losses.
    """
    assert plan.model is not None
    first, last = 0, schedule.stages - 1
    tied = (
        Model.from_hf(dict(plan.model)).tied
        and plan.schedule.placement.device_of[first] == plan.schedule.placement.device_of[last]
    )
    sums: dict[str, Terms] = {}

    def add(to: str, term: str, micro_batch: int) -> None:
        sums.setdefault(to, []).append((term, micro_batch))

    for order in schedule.orders:
        for kind, stage, j in order:
            if kind is Kind.F and stage == last:
                add("loss", "loss", j)
            if kind in (Kind.B, Kind.W):
                add(f"linear {stage}", "gradient", j)
                if tied and stage == last:
                    add("table", "head", j)
            if kind in (Kind.B, Kind.I):
                add(f"other {stage}", "gradient", j)
                if tied and stage == first:
                    add("table", "embedding", j)
    return sums


PLAN, FOUND = "plan.json", "found.json"


def check_searchable(plan: Plan) -> None:
    """Refuse a plan with more than the search can order.  Raises InputError with one sentence."""
    beside = sorted({op.kind.value for op in plan.schedule.operations} & {"G", "D", "S", "P"})
    if beside:
        raise InputError(
            f"--online orders F, B, I, W, R, O and L, but the plan also has {', '.join(beside)}: train it without."
        )
    if plan.schedule.peers:
        raise InputError("--online orders offloads to the host, but the plan's go to peer devices: train it without.")


@dataclass(frozen=True)
class BetterOrder:
    """Another order of a plan's stages, which is faster for the same costs."""

    plan: Plan
    makespan: float
    """Seconds per step that are predicted for it."""
    makespan_before: float
    """Seconds per step of the plan that its search began with."""


class _File(msgspec.Struct):
    """A BetterOrder on disk."""

    plan: PlanFile
    makespan: float
    makespan_before: float


def save_order(order: BetterOrder, path: Path) -> None:
    """Write a file that `load_order` reads."""
    write_whole(path, msgspec.json.encode(_File(order.plan.to_file(), order.makespan, order.makespan_before)))


def load_order(path: Path) -> BetterOrder:
    """Read what `save_order` has written."""
    file = msgspec.json.decode(path.read_bytes(), type=_File)
    return BetterOrder(Plan.of_file(file.plan), file.makespan, file.makespan_before)


def better_orders(plan: Plan, *, effort: float, seed: int = 0) -> Iterator[BetterOrder]:
    """Orders that are faster and faster for the plan's costs, of the same stages and with equal losses.

    The search starts from the plan and from those published schedules that add up in the same order.
    """
    from debubble.planners.optpipe import initial
    from debubble.search.effort import Effort
    from debubble.search.optimize import optimize
    from debubble.search.problem import OrderProblem

    problem = OrderProblem.of(plan.schedule, plan.costs)
    start = best = problem.value(plan.schedule)
    sums, begin = summation(plan, plan.schedule), time.perf_counter()
    published = [schedule for schedule in initial(problem, Effort(0)) if summation(plan, schedule) == sums]
    for found in optimize(problem, starts=[plan.schedule, *published], effort=effort, seed=seed):
        schedule = replace(found.schedule, name="searched")
        if found.value < best and summation(plan, schedule) == sums:
            best = found.value
            better = replace(
                plan,
                planner="optpipe",
                schedule=schedule,
                lower_bound=found.bound,
                solve_seconds=time.perf_counter() - begin,
                candidates=(),
            )
            yield BetterOrder(better, float(best), float(start))


def main(folder: Path, effort: float) -> None:
    """Search until the optimum is proven or the effort is spent."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    for better in better_orders(Plan.load(folder / PLAN), effort=effort):
        save_order(better, folder / FOUND)


def _end_with_parent(folder: Path) -> None:
    """The parent never writes: when reading ends, it is gone, and nobody wants the files any more."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
