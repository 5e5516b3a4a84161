"""Hand-written plans of a small model, at its computed costs or at costs of 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import debubble as db
from debubble.costs import Cluster, model_units
from debubble.costs.partition import Partition, partition_named
from debubble.ir import Op, PlannedUnit, RunOptions, Schedule, StageCosts
from debubble.models import Model
from debubble.planners.model_problem import half_layers
from debubble.plans import ModelOnCluster, Plan
from debubble.targets.offload import ModuleOffload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}

Strategy = Callable[[int], tuple[str, str]]


def plain(layer: int) -> tuple[str, str]:
    return "none", "none"


def full(*chosen: int) -> Strategy:
    return lambda layer: ("full", "full") if layer in chosen else ("none", "none")


def units(layers: list[int], strategy: Strategy = plain) -> tuple[tuple[PlannedUnit, ...], ...]:
    """That many layers per stage, with embedding and head at the ends."""
    first = 0
    stages: list[list[PlannedUnit]] = []
    for count in layers:
        stage = []
        for layer in range(first, first + count):
            attention, mlp = strategy(layer)
            stage += [PlannedUnit("attention", layer, attention), PlannedUnit("mlp", layer, mlp)]
        stages.append(stage)
        first += count
    stages[0].insert(0, PlannedUnit("embedding", None))
    stages[-1].append(PlannedUnit("head", None))
    return tuple(map(tuple, stages))


def plan(schedule: Schedule, layers: list[int], strategy: Strategy = plain, **costs: Any) -> Plan:
    """A plan of a units file, whose costs are not those of a model."""
    return Plan(
        planner="hand",
        schedule=schedule,
        costs=StageCosts.of(stages=len(layers), **costs),
        lower_bound=0,
        partition=units(layers, strategy),
    )


def one_f_one_b(layers: list[int], strategy: Strategy = plain, **costs: Any) -> Plan:
    return plan(db.schedules["1f1b"](devices=len(layers), micro_batches=8), layers, strategy, **costs)


def interleaved(layers: list[int], strategy: Strategy = plain, *, order: str = "interleaved") -> Plan:
    devices = len(layers) // 2
    return plan(db.schedules[order](devices=devices, micro_batches=8, chunks=2), layers, strategy)


def priced(
    strategy: Strategy = plain,
    *,
    layers: tuple[int, ...] = (2, 2),
    config: dict[str, Any] = LLAMA,
    schedule: Schedule | None = None,
    head: str = "none",
    on_host: Iterable[int] = (),
    memory_limit: float | None = None,
    **options: Any,
) -> Plan:
    """A plan of a small model at its computed costs, on one device per stage."""
    run = RunOptions(**options)
    model = Model.from_hf({**config, "num_hidden_layers": sum(layers)})
    schedule = schedule or db.schedules["1f1b"](devices=len(layers), micro_batches=8)
    cluster = Cluster.parse(f"{schedule.devices * run.tensor * run.context * run.data}xA100-80GB")
    all_units = model_units(model, cluster, run, pipeline=schedule.devices)
    strategies = ["none", *(name for layer in range(sum(layers)) for name in strategy(layer)), head]
    ends = [1 + 2 * sum(layers[: s + 1]) for s in range(len(layers))]
    ends[-1] += 1
    bounds = zip([0, *ends[:-1]], ends, strict=True)
    partition = Partition([(i, strategies[i]) for i in range(begin, end)] for begin, end in bounds)
    explicit = {stage for stage, _ in schedule.explicit_recompute}
    costs = all_units.stage_costs(partition, schedule.placement, on_host=set(on_host))
    return Plan(
        planner="hand",
        schedule=replace(schedule, fused_recompute=partition.recomputing - explicit),
        costs=costs.with_limit(memory_limit),
        lower_bound=0,
        partition=all_units.planned(partition),
        model_on_cluster=ModelOnCluster(model, cluster),
        options=run,
    )


def moving(plan: Plan, setting: ModuleOffload) -> Plan:
    """The priced plan with modules offloaded."""
    assert plan.model_on_cluster is not None
    halves = half_layers(*plan.model_on_cluster, plan.options, pipeline=plan.devices, target="megatron")
    partition = partition_named(plan.partition, halves)
    schedule = setting.schedule(plan.schedule, halves, partition)
    return replace(
        plan, schedule=schedule, costs=halves.offloading_modules().stage_costs(partition, schedule.placement)
    )


def with_operations(schedule: Schedule, *pairs: tuple[str, str]) -> Schedule:
    """A schedule with additional operations, each before the second of its pair or after its stage's last backward."""
    orders = [[op.name for op in order] for order in schedule.orders]
    for name, before in pairs:
        order = orders[schedule.placement.device_of[Op.parse(name).stage]]
        order.insert(order.index(before) if before in order else len(order), name)
    parsed = tuple(tuple(map(Op.parse, order)) for order in orders)
    return replace(schedule, orders=parsed)


def offloading(**costs: Any) -> Plan:
    """Two forwards of one stage, the first of which is offloaded until its backward."""
    names = ["0F0", "0O0", "0F1", "0B1", "0L0", "0B0"]
    return plan(Schedule.of("mine", db.Placement.linear(1), 2, [names]), [2], offload=1, **costs)
