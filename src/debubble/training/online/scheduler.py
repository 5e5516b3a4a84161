"""Search process of online scheduling: `python -m debubble.training.online.scheduler FOLDER EFFORT STEPS_LEFT`.

It reads `plan.json` in the folder, which has the measured costs, and replaces `found.json` whenever it has found a
faster order, for the same or another partition.  It imports no torch, uses one thread, and ends with its parent.

Only orders that keep the plan's order of floating-point sums are accepted, so that losses stay bitwise equal.  An
operator's result does not depend on when it runs, and a split backward computes the same as a fused one, so the order
of sums is all that an order of operations could change.
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
"""(name, micro-batch) of the terms of a sum, in the order of addition."""


def summation(plan: Plan, schedule: Schedule) -> dict[str, Terms]:
    """The floating-point sums of a step, with their terms in order.

    Linear operators accumulate gradients in B or W, all others in B or I; a tied embedding on one device accumulates
    those of two stages; the last stage sums losses.
    """
    first, last, device_of = 0, schedule.stages - 1, plan.schedule.placement.device_of
    tied = plan.model is not None and plan.model.tied and device_of[first] == device_of[last]
    sums: dict[str, Terms] = {}
    ends = [0, *accumulate(plan.lengths)]

    def add(name: str, term: str, micro_batch: int) -> None:
        sums.setdefault(name, []).append((term, micro_batch))

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
    # All units of a stage share its sums.
    of_units = {
        f"{operators} of unit {unit}": sums[of_stage]
        for stage in range(schedule.stages)
        for operators in ("linear", "other")
        if (of_stage := f"{operators} {stage}") in sums
        for unit in range(ends[stage], ends[stage + 1])
    }
    return of_units | {name: terms for name, terms in sums.items() if name in ("loss", "table")}


PLAN, RESULT = "plan.json", "found.json"
MAX_PLAN_EFFORT = 10.0
"""Maximum effort of replanning, in seconds of the reference machine: that of `debubble plan`."""


def check_searchable(plan: Plan, option: str = "--online") -> None:
    """Raise InputError if the plan has operations that the search of an option cannot order."""
    if plan.schedule.slices > 1:
        raise InputError(f"{option} orders whole sequences, but the plan divides them into slices: train it without.")
    stages = plan.schedule.host_steps
    alongside = {op for op in plan.schedule.operations if op.kind in (Kind.G, *HOST_STEP)}
    searchable = plan.schedule.without_host_steps().with_host_steps(stages).operations
    hosted = {op for op in searchable if op.stage in stages and op.kind in HOST_STEP}
    if unsupported := sorted({op.kind.value for op in alongside - hosted}):
        raise InputError(
            f"{option} orders F, B, I, W, R, O and L, and steps on hosts behind them, but the plan also has"
            f" {', '.join(unsupported)}: train it without."
        )
    if plan.schedule.peers:
        raise InputError(f"{option} orders offloads to the host, but the plan's go to peer devices: train it without.")


@dataclass(frozen=True)
class BetterOrder:
    """A plan with another order of operations, or another partition, that is predicted to be faster."""

    plan: Plan
    makespan: float
    """Predicted seconds per step."""
    makespan_before: float
    """Predicted seconds per step of the search's initial plan; inf if that exceeds the memory limit."""


class _File(msgspec.Struct):
    """A BetterOrder on disk."""

    plan: PlanFile
    makespan: float
    makespan_before: float | None
    """None: inf, which JSON cannot represent."""


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
    """Improving plans for the same devices, with bitwise equal losses.

    Half of the effort is for other orders of the plan; the rest is for orders of other plans: with moved units,
    replanned if there is a profile, and with other recomputation or offload.  The search starts from the plan's order
    and from published schedules with the same order of sums.

    Args:
        plan: The running plan with measured costs.
        effort: Effort of the search, in seconds of the reference machine.
        steps_left: Remaining steps over which moving units must amortize; 0: units stay in their stages.
    """
    from debubble.training.online.memory_variants import offload_variants, recomputation_variants
    from debubble.training.online.partition import better_partition, move_seconds, replanned

    repartitioned = better_partition(plan, _price) if steps_left else None
    variants = [*recomputation_variants(plan), *offload_variants(plan)]
    other_plans = len(variants) + (repartitioned is not None) + (plan.profile is not None)
    local_effort = effort / 2 if other_plans else effort

    def candidates() -> Iterator[Plan]:
        yield plan
        if repartitioned is not None:
            yield repartitioned
        # Replanning takes seconds, in which the run may already adopt an earlier candidate.
        remade = replanned(plan, effort=min(MAX_PLAN_EFFORT, effort / 4))
        if remade is not None and (steps_left or remade.lengths == plan.lengths):
            yield remade
        yield from variants

    try:
        start = best = _problem(plan).value(plan.schedule.without_host_steps())
    except OutOfMemoryError:
        start = best = math.inf
    sums, begin = summation(plan, plan.schedule), time.perf_counter()
    refusal: InfeasibleError | None = None
    for candidate in candidates():
        share = local_effort if candidate is plan else (effort - local_effort) / other_plans
        moves = candidate.lengths != plan.lengths
        moving = move_seconds(plan, candidate) / steps_left if moves else 0.0
        try:
            for incumbent in _orders(candidate, sums, effort=share):
                schedule = replace(incumbent.schedule, name="searched")
                if incumbent.value + moving < best and summation(candidate, schedule) == sums:
                    best = incumbent.value + moving
                    better = replace(
                        candidate,
                        planner="optpipe",
                        schedule=schedule.with_host_steps(plan.schedule.host_steps),
                        lower_bound=incumbent.bound,
                        solve_seconds=time.perf_counter() - begin,
                        candidates=(),
                    )
                    yield BetterOrder(better, float(incumbent.value), float(start))
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
    """Bytes by which a plan exceeds its memory limit, and its step time."""
    schedule, costs = plan.schedule, plan.costs
    try:
        return 0.0, float(_problem(plan).value(schedule.without_host_steps()))
    except OutOfMemoryError:
        peaks = simulate(schedule, costs.with_limit(None)).peak_memory
        limits = [costs.limit_of(device) for device in range(schedule.devices)]
        over = [peak - limit for peak, limit in zip(peaks, limits, strict=True) if limit is not None]
        return float(sum(max(0, more) for more in over)), math.inf


def _orders(plan: Plan, sums: Mapping[str, Terms], *, effort: float) -> Iterator[Incumbent]:
    """Improving orders of a plan, starting from its own and from published ones with the same `sums`.

    Raises InfeasibleError if none fits the memory limit.
    """
    from debubble.planners.initial_schedules import initial
    from debubble.search.effort import Effort
    from debubble.search.optimize import optimize

    problem, current = _problem(plan), plan.schedule.without_host_steps()
    starts = [schedule for schedule in (current, *initial(problem, Effort(0))) if summation(plan, schedule) == sums]
    return optimize(problem, starts=starts, effort=effort)


def main(folder: Path, effort: float, steps_left: int) -> None:
    """Search until optimality is proven or the effort is spent."""
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    for better in better_orders(Plan.load(folder / PLAN), effort=effort, steps_left=steps_left):
        save_order(better, folder / RESULT)


def _end_with_parent(folder: Path) -> None:
    """Wait for the end of standard input, to which the parent never writes; then remove the files and exit."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
