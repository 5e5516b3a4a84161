import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, StageCosts
from debubble.planners import FixedStages, ModelUnits, Problem, planners
from debubble.planners.baselines.adapipe import DynamicPrograms
from debubble.planners.registry import Result


def unit(work: int, activation: int, cheap: int, static: int = 1) -> Unit:
    return Unit(
        type=f"unit of {work}",
        layer=None,
        forward=work,
        backward_input=work,
        backward_weight=work,
        static=static,
        strategies={
            "none": Strategy(activation),
            "cheap": Strategy(activation - cheap, cheap / 4),
            "full": Strategy(1, work),
        },
    )


def layer(work: int, activation: int, cheap: int) -> tuple[Unit, Unit]:
    """Two halves of a layer, which keep one input if both recompute in full."""
    first, second = unit(work, activation, cheap), unit(work + 1, activation + 1, cheap)
    shared = {**second.strategies, "full": replace(second.strategies["full"], after_full=0)}
    return replace(first, layer=0), replace(second, layer=0, strategies=shared)


def brute_force(units: Any, limit: Any, devices: Any, micro_batches: Any, *, workspace: Any = None) -> Any:
    """The minimum of sum + (m - 1) max of stage times over all cuts and strategies; infinite if nothing fits."""
    max_work = 2 * sum(u.work for u in units) / devices
    return min(
        (
            sum(times) + (micro_batches - 1) * max(times)
            for ends in itertools.combinations(range(1, len(units)), devices - 1)
            if (stages := [units[a:b] for a, b in itertools.pairwise((0, *ends, len(units)))])
            if all(len(stage) == 1 or sum(u.work for u in stage) <= max_work for stage in stages)
            if (times := [min_time(x, limit, min(micro_batches, devices - s), workspace) for s, x in enumerate(stages)])
        ),
        default=float("inf"),
    )


def min_time(stage: Any, limit: Any, alive: Any, workspace: Any) -> Any:
    """The shortest time of a stage over all strategies of its units.

    `workspace` is the memory of a recomputation; None takes that of the strategies.
    """
    units = Units(units=stage)
    choices = [units.stage_sums(tuple(enumerate(names))) for names in itertools.product(*(u.strategies for u in stage))]
    return min(
        (
            sum(u.work for u in stage) + sums.recompute
            for sums in choices
            for restored in [sums.recompute_workspace if workspace is None else workspace]
            if alive * sums.activation_recomputed + restored + sums.static <= limit
        ),
        default=float("inf"),
    )


sizes = st.integers(1, 4), st.integers(4, 9), st.integers(1, 3)


@settings(max_examples=15)
@given(
    few=st.lists(st.builds(lambda *size: (unit(*size),), *sizes) | st.builds(layer, *sizes), min_size=1, max_size=2),
    count=st.integers(3, 4),
    devices=st.integers(1, 3),
    micro_batches=st.integers(2, 6),
    limit=st.integers(10, 60),
    data=st.data(),
)
def test_adapipe_finds_the_best_cut_and_strategies(
    few: Any, count: Any, devices: Any, micro_batches: Any, limit: Any, data: Any
) -> None:
    """Brute force is matched, but for plans that fit only because their workspace is small."""
    layers = data.draw(st.lists(st.sampled_from(few), min_size=count, max_size=count))
    chosen = tuple(replace(u, layer=n) for n, layer_units in enumerate(layers) for u in layer_units)[:5]
    units = Units(units=chosen, memory_limit=(limit,))
    problem = Problem(devices=devices, micro_batches=micro_batches, workload=ModelUnits(units))
    programs = DynamicPrograms(problem, units)
    try:
        lengths = programs.lengths()[0]
    except InfeasibleError:
        time = float("inf")
    else:
        ends = list(itertools.accumulate(lengths, initial=0))
        times = [
            sum(u.work for u in chosen[a:b]) + choice.recompute
            for (a, b), choice in zip(itertools.pairwise(ends), programs.choices(lengths), strict=True)
        ]
        time = sum(times) + (micro_batches - 1) * max(times)
    largest = 2 * max(u.activation for u in chosen)
    assert brute_force(chosen, limit, devices, micro_batches) <= time + 1e-9
    assert time <= brute_force(chosen, limit, devices, micro_batches, workspace=largest) + 1e-9


def partition_of(result: Result) -> Sequence[Sequence[tuple[int, str]]]:
    assert result.solution.partition is not None
    return result.solution.partition


@pytest.mark.parametrize("name", ["adapipe", "obscura"])
def test_layers_that_recompute_in_full_fit_with_one_input_each(name: str) -> None:
    halves = tuple(replace(u, layer=n) for n in range(4) for u in layer(4, 9, 2))
    problem = Problem(devices=2, micro_batches=4, workload=ModelUnits(Units(units=halves)))
    peak = max(planners["dapple+"](problem).timeline.peak_memory)
    limited = replace(problem, workload=ModelUnits(Units(units=halves, memory_limit=(peak,))))
    assert max(planners[name](limited).timeline.peak_memory) == peak


def test_adapipe_recomputes_most_on_the_first_stages() -> None:
    units = Units(units=(unit(4, 9, 2, static=0),) * 24, memory_limit=(150,))
    result = planners["adapipe"](Problem(devices=4, micro_batches=32, workload=ModelUnits(units)))
    recomputed = [sum(name != "none" for _, name in stage) for stage in partition_of(result)]
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] > recomputed[-1]
    counts = [len(stage) for stage in partition_of(result)]
    assert counts[0] <= counts[-1]
    assert max(result.timeline.peak_memory) <= 150
    everything = planners["dapple+"](Problem(devices=4, micro_batches=32, workload=ModelUnits(units)))
    assert result.makespan < everything.makespan


def test_adapipe_recomputes_only_stages_that_do_not_fit() -> None:
    costs = StageCosts.of(stages=4, memory_limit=2)
    result = planners["adapipe"](Problem(devices=4, micro_batches=8, workload=FixedStages(costs)))
    assert result.solution.schedule.fused_recompute == {0, 1}


def test_adapipe_refuses_fixed_stages_that_never_fit() -> None:
    costs = StageCosts.of(stages=4, memory_limit=2, activation=3)
    with pytest.raises(InfeasibleError, match="Stage 0 does not fit"):
        planners["adapipe"](Problem(devices=4, micro_batches=8, workload=FixedStages(costs)))


@pytest.mark.parametrize(("limit", "strategy"), [(100, "none"), (70, "cheap"), (40, "full")])
def test_kwai_takes_the_cheapest_operators_that_fit(limit: int, strategy: str) -> None:
    units = Units(units=(unit(4, 9, 3, static=0),) * 8, memory_limit=(limit,))
    result = planners["megatron-kwai"](Problem(devices=4, micro_batches=8, workload=ModelUnits(units)))
    assert {name for stage in partition_of(result) for _, name in stage} == {strategy}


def test_kwai_says_why_nothing_fits() -> None:
    units = Units(units=(unit(4, 9, 3, static=9),) * 8, memory_limit=(20,))
    with pytest.raises(InfeasibleError, match="No operators suffice: Device"):
        planners["megatron-kwai"](Problem(devices=4, micro_batches=8, workload=ModelUnits(units)))
