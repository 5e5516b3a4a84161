"""What `joint` finds for tiny models, beside the best of all plans that have one stage per device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import inf

import pytest

from debubble.costs import Strategy, Unit, Units
from debubble.costs.partition import Partition
from debubble.ir import DebubbleError, Kind, Op, Placement, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.planners import planners
from debubble.planners.bounds import proven_bound
from debubble.planners.problem import ModelUnits, Problem

DEVICES = 2
KINDS = (Kind.F, Kind.I, Kind.W, Kind.R)
F, I, W, R = range(4)  # noqa: E741 - the field's letters


def random_units(seed: int) -> tuple[Units, int]:
    """A model of two or three units, which fill two devices with a stage each, and a number of micro-batches.

    Three micro-batches have so many orders that no unit can be recomputed there.
    """
    chance = random.Random(seed)
    micro_batches = chance.randint(1, 3)
    strategies = {"none": Strategy(4)}
    if micro_batches < 3:
        strategies["full"] = Strategy(1, chance.randint(1, 4))
    units = tuple(
        Unit(
            type="layer", layer=None, forward=chance.randint(1, 4), backward_input=chance.randint(1, 4),
            backward_weight=chance.randint(1, 4), static=2, activation_after_input=chance.randint(1, 3),
            strategies=strategies,
        )
        for _ in range(chance.randint(2, 3))
    )  # fmt: skip
    model = Units(units=units, communication=chance.randint(0, 2), memory_limit=(chance.randint(8, 24),))
    return model, micro_batches


def best_time(units: Units, micro_batches: int) -> float:
    """The makespan of the best plan, of all with one stage per device; infinite if none fits."""
    count = len(units.units)
    best = inf
    for first in range(1, count):
        for names in product(*(unit.strategies for unit in units.units)):
            partition = Partition([[(u, names[u]) for u in range(first)], [(u, names[u]) for u in range(first, count)]])
            costs = units.stage_costs(partition, Placement.linear(DEVICES))
            lists = [lists_of(costs, d, micro_batches, d in partition.recomputing) for d in range(DEVICES)]
            for above, below in product(*lists):
                best = min(best, makespan((above, below), float(costs.communication[0]), best))
    return best


def lists_of(costs: StageCosts, d: int, micro_batches: int, recomputes: bool) -> list[list[tuple[int, float]]]:
    """Every list of a device with one stage that fits its memory, as kinds and times.

    Where it recomputes, either every backward does so first, or some micro-batches do by an operation of their own.
    """
    nothing = (False,) * micro_batches
    fused = OpCosts(costs=costs, fused_recompute=frozenset({d} if recomputes else ()))
    ways = [(fused, nothing)]
    if recomputes:
        ways += [(OpCosts(costs=costs), again) for again in product((False, True), repeat=micro_batches) if any(again)]
    return [
        [(kind, float(priced.time(Op(KINDS[kind], d, 0), explicit=again[j]))) for kind, j in order]
        for priced, again in ways
        for order in all_orders(again)
        if fits(order, priced, d, again)
    ]


def all_orders(again: Sequence[bool], done: tuple[int, ...] = (0, 0, 0, 0)) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every order of a stage's operations as (kind, micro-batch); micro-batches are alike and keep their turn.

    Args:
        again: Per micro-batch, whether an R recomputes it.
        done: Operations of each kind that are behind.
    """
    forwards, inputs, weights, recomputations = done
    chosen = [j for j, recomputed in enumerate(again) if recomputed]
    if weights == len(again):
        yield ()
    following = []
    if forwards < len(again):
        following.append((F, forwards))
    if inputs < forwards and (not again[inputs] or inputs in chosen[:recomputations]):
        following.append((I, inputs))
    if weights < inputs:
        following.append((W, weights))
    if recomputations < len(chosen) and chosen[recomputations] < forwards:
        following.append((R, chosen[recomputations]))
    for kind, j in following:
        for rest in all_orders(again, tuple(n + (k == kind) for k, n in enumerate(done))):
            yield ((kind, j), *rest)


def fits(order: Sequence[tuple[int, int]], priced: OpCosts, stage: int, again: Sequence[bool]) -> bool:
    """Tell whether the device of a stage always has the bytes that an operation needs when it starts."""
    limit = priced.costs.limit_of(stage)
    assert limit is not None
    used = priced.costs.static_of(stage)
    for kind, j in order:
        op = Op(KINDS[kind], stage, 0)
        used += priced.allocates(op, explicit=again[j])
        if used > limit:
            return False
        used -= priced.frees(op, explicit=again[j])
    return True


def makespan(lists: Sequence[Sequence[tuple[int, float]]], communication: float, below: float) -> float:
    """When the last operation ends; infinite if the devices wait for one another or it is not below what is known."""
    ends: list[list[list[float]]] = [[[] for _ in KINDS] for _ in lists]
    free, places = [0.0, 0.0], [0, 0]
    while places != [len(order) for order in lists]:
        moved = False
        for d, order in enumerate(lists):
            while places[d] < len(order):
                kind, time = order[places[d]]
                if kind == 1 - d:
                    # The second device's forwards and the first one's backwards wait for a message.
                    number = len(ends[d][kind])
                    if number >= len(ends[1 - d][kind]):
                        break
                    free[d] = max(free[d], ends[1 - d][kind][number] + communication)
                free[d] += time
                ends[d][kind].append(free[d])
                places[d] += 1
                moved = True
        if not moved or max(free) >= below:
            return inf
    return max(free)


def problem_of(units: Units, micro_batches: int, *, chunks: int | None = 1) -> Problem:
    """The problem that `joint` is given; without a number of chunks a device may have two stages and the other one."""
    return Problem(workload=ModelUnits(units), devices=DEVICES, micro_batches=micro_batches, chunks=chunks, effort=0.1)


def found_time(units: Units, micro_batches: int, *, chunks: int | None = 1) -> float:
    """The makespan of the plan that `joint` finds; infinite if it finds none."""
    try:
        return float(planners["joint"](problem_of(units, micro_batches, chunks=chunks)).time)
    except DebubbleError:
        return inf


@cache
def tiny_model(seed: int) -> tuple[Units, int, float]:
    """A model, its micro-batches, and the makespan of its best plan."""
    units, micro_batches = random_units(seed)
    return units, micro_batches, best_time(units, micro_batches)


def times_over_the_best(models: int) -> list[float]:
    """How many times the best plan's time the found plan takes, for the first tiny models."""
    times = []
    for seed in range(models):
        units, micro_batches, best = tiny_model(seed)
        found = found_time(units, micro_batches)
        times.append(1.0 if found == best else found / best)
    return times


@pytest.mark.parametrize("models", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_no_plan_of_tiny_models_is_faster_than_the_one_found(models: int) -> None:
    """A plan whose micro-batches recompute by two levels, which are no part of these, may be faster."""
    assert max(times_over_the_best(models)) <= 1 + 1e-12


@pytest.mark.slow
def test_units_that_are_assigned_freely_are_never_slower_than_one_stage_per_device() -> None:
    times = [
        (found_time(units, micro_batches, chunks=None), best)
        for units, micro_batches, best in map(tiny_model, range(40))
    ]
    assert all(found <= best for found, best in times)
    # Three units, of which the first device has two stages.
    assert any(found < best for found, best in times)


@pytest.mark.parametrize("models", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_no_plan_of_tiny_models_beats_its_bound(models: int) -> None:
    for seed in range(models):
        units, micro_batches, best = tiny_model(seed)
        for chunks in (1, None):
            if best < inf:
                assert proven_bound(problem_of(units, micro_batches, chunks=chunks)).time <= best
