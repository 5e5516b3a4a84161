"""Searches next to a training run: `python -m debubble.training.online.scheduler FOLDER EFFORT STEPS_LEFT`.

It reads `plan.json` in the folder, whose costs are the measured ones, and replaces `found.json` whenever it has found a
faster order, of the same stages or of some with other units.  It imports no torch, computes with one thread, and ends
when its parent does.

Only orders that add up floating-point numbers as the plan does are taken, so that losses stay the same bit for bit:
every operator computes the same from the same inputs whenever it runs, and a split backward computes what a whole one
does. All that an order of operations could change is the order of sums.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from debubble.errors import InfeasibleError, InputError, OutOfMemoryError
from debubble.files import write_whole
from debubble.ir import Kind, Schedule
from debubble.ir.ops import HOST_STEP
from debubble.plans import Plan
from debubble.plans.plan_file import PlanFile
from debubble.simulator import simulate

if TYPE_CHECKING:
    from debubble.search.problem import Incumbent, OrderProblem

Terms = list[tuple[str, int]]


def summation(plan: Plan, schedule: Schedule) -> dict[str, Terms]:
    """Sums of floating-point numbers in a step of the schedule, each with its terms in order.

    A unit's linear operators add their gradients in its stage's B or W, all others in its B or I; a tied table on one
    device gets both from two stages; the last stage adds losses.
    """
    first, last, device_of = 0, schedule.stages - 1, plan.schedule.placement.device_of
    tied = plan.model is not None and plan.model.tied and device_of[first] == device_of[last]
    sums: dict[str, Terms] = {}
    ends = [0, *accumulate(plan.lengths)]

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
    # All units of a stage add up alike: they share its lists.
    of_units = {
        f"{what} of unit {unit}": sums[of_stage]
        for stage in range(schedule.stages)
        for what in ("linear", "other")
        if (of_stage := f"{what} {stage}") in sums
        for unit in range(ends[stage], ends[stage + 1])
    }
    return of_units | {name: terms for name, terms in sums.items() if name in ("loss", "table")}


PLAN, FOUND = "plan.json", "found.json"
PLAN_EFFORT = 10.0
"""Most effort of a plan made anew, in seconds of the reference machine: that of `debubble plan`."""


def check_searchable(plan: Plan, option: str = "--online") -> None:
    """Refuse a plan with more than the search of an option can order.  Raises InputError with one sentence."""
    if plan.schedule.slices > 1:
        raise InputError(f"{option} orders whole sequences, but the plan divides them into slices: train it without.")
    stages = plan.schedule.host_steps
    alongside = {op for op in plan.schedule.operations if op.kind in (Kind.G, *HOST_STEP)}
    kept = plan.schedule.without_host_steps().with_host_steps(stages).operations
    hosted = {op for op in kept if op.stage in stages and op.kind in HOST_STEP}
    if left := sorted({op.kind.value for op in alongside - hosted}):
        raise InputError(
            f"{option} orders F, B, I, W, R, O and L, and steps on hosts behind them, but the plan also has"
            f" {', '.join(left)}: train it without."
        )
    if plan.schedule.peers:
        raise InputError(f"{option} orders offloads to the host, but the plan's go to peer devices: train it without.")


@dataclass(frozen=True)
class BetterOrder:
    """Another order of a plan's operations, or another partition of its units, which is faster for the same costs."""

    plan: Plan
    makespan: float
    """Seconds per step that are predicted for it."""
    makespan_before: float
    """Seconds per step of the plan that its search began with; inf if that exceeds the memory limit."""


class _File(msgspec.Struct):
    """A BetterOrder on disk."""

    plan: PlanFile
    makespan: float
    makespan_before: float | None
    """None: inf, which JSON has not."""


def save_order(order: BetterOrder, path: Path) -> None:
    """Write a file that `load_order` reads."""
    before = order.makespan_before if math.isfinite(order.makespan_before) else None
    write_whole(path, msgspec.json.encode(_File(order.plan.to_file(), order.makespan, before)))


def load_order(path: Path) -> BetterOrder:
    """Read what `save_order` has written."""
    file = msgspec.json.decode(path.read_bytes(), type=_File)
    before = math.inf if file.makespan_before is None else file.makespan_before
    return BetterOrder(Plan.of_file(file.plan), file.makespan, before)


def better_orders(plan: Plan, *, effort: float, steps_left: int = 0) -> Iterator[BetterOrder]:
    """Plans that are faster and faster for the plan's costs, of the same devices and with equal losses.

    Half of the effort is for other orders, the rest for orders of plans that divide the units otherwise, that are made
    anew, if the plan has a profile, or that keep more or less for their backwards.  The search starts from the plan's
    own order and from those published schedules that add up in the same order.

    Args:
        plan: What runs, with the costs that were measured.
        effort: Work of the search, in seconds of the reference machine.
        steps_left: Steps in which moving units has to pay; 0: units stay in their stages.
    """
    from debubble.training.online.memory_variants import offload_variants, recomputation_variants
    from debubble.training.online.partition import better_partition, move_seconds, replanned

    repartitioned = better_partition(plan, _price) if steps_left else None
    variants = [*recomputation_variants(plan), *offload_variants(plan)]
    others = len(variants) + (repartitioned is not None) + (plan.profile is not None)
    own = effort / 2 if others else effort

    def candidates() -> Iterator[Plan]:
        yield plan
        if repartitioned is not None:
            yield repartitioned
        # It takes seconds, in which a run may have adopted what came before.
        anew = replanned(plan, effort=min(PLAN_EFFORT, effort / 4))
        if anew is not None and (steps_left or anew.lengths == plan.lengths):
            yield anew
        yield from variants

    try:
        start = best = _problem(plan).value(plan.schedule.without_host_steps())
    except OutOfMemoryError:
        start = best = math.inf
    sums, begin = summation(plan, plan.schedule), time.perf_counter()
    refusal: InfeasibleError | None = None
    for candidate in candidates():
        share = own if candidate is plan else (effort - own) / others
        moves = candidate.lengths != plan.lengths
        moving = move_seconds(plan, candidate) / steps_left if moves else 0.0
        try:
            for found in _orders(candidate, sums, effort=share):
                schedule = replace(found.schedule, name="searched")
                if found.value + moving < best and summation(candidate, schedule) == sums:
                    best = found.value + moving
                    better = replace(
                        candidate,
                        planner="optpipe",
                        schedule=schedule.with_host_steps(plan.schedule.host_steps),
                        lower_bound=found.bound,
                        solve_seconds=time.perf_counter() - begin,
                        candidates=(),
                    )
                    yield BetterOrder(better, float(found.value), float(start))
        except InfeasibleError as error:
            refusal = error
    if refusal is not None and best == math.inf:
        raise refusal


def _problem(plan: Plan) -> OrderProblem:
    from debubble.planners.model_problem import objective_of
    from debubble.search.problem import OrderProblem

    problem = OrderProblem.from_schedule(plan.schedule, plan.costs, objective=objective_of(plan.options))
    return replace(problem, host_steps=plan.schedule.host_steps)


def _price(plan: Plan) -> tuple[float, float]:
    """Bytes by which a plan exceeds its memory limit, and the seconds of its step."""
    schedule, costs = plan.schedule, plan.costs
    try:
        return 0.0, float(_problem(plan).value(schedule.without_host_steps()))
    except OutOfMemoryError:
        peaks = simulate(schedule, costs.with_limit(None)).peak_memory
        limits = [costs.limit_of(device) for device in range(schedule.devices)]
        over = [peak - limit for peak, limit in zip(peaks, limits, strict=True) if limit is not None]
        return float(sum(max(0, more) for more in over)), math.inf


def _orders(plan: Plan, sums: Mapping[str, Terms], *, effort: float) -> Iterator[Incumbent]:
    """Orders of a plan's operations, better and better, from its own and from published ones with these `sums`.

    Raises InfeasibleError if none fits the memory limit.
    """
    from debubble.planners.initial_schedules import initial
    from debubble.search.effort import Effort
    from debubble.search.optimize import optimize

    problem, own = _problem(plan), plan.schedule.without_host_steps()
    starts = [schedule for schedule in (own, *initial(problem, Effort(0))) if summation(plan, schedule) == sums]
    return optimize(problem, starts=starts, effort=effort)


def main(folder: Path, effort: float, steps_left: int) -> None:
    """Search until the optimum is proven or the effort is spent."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    for better in better_orders(Plan.load(folder / PLAN), effort=effort, steps_left=steps_left):
        save_order(better, folder / FOUND)


def _end_with_parent(folder: Path) -> None:
    """The parent never writes: when reading ends, it is gone, and nobody wants the files any more."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
