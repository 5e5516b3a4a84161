"""How well a plan predicts its run: two ranks of this machine, one thread each.

    python benchmarks/plan_vs_measured.py [--rounds 40] [--output benchmarks/results/plan_vs_measured.json]

For every schedule, the same two processes measure the units' costs and run steps in turn, so that whatever else the
machine does meets both alike.  The costs are medians over the rounds; so is the step.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import measured_by

import debubble as db
from debubble.costs.step import parameter_bytes
from debubble.costs.units import Partition, Units
from debubble.ir import PlannedUnit, RunOptions
from debubble.models import ModelConfig, named_model
from debubble.plans import ModelOnCluster
from debubble.processes import available_cores
from debubble.profiler.profile import message_time, units_of_layers
from debubble.profiler.units import Measurements, ModelSlice, costs_of, merge
from debubble.runtime.launcher import launch, open_process_group, run_rank
from debubble.runtime.pipeline import Pipeline
from debubble.training.optimizer import optimizer_maker
from debubble.views.comparison import compare

RANKS, MICRO_BATCHES = 2, 8
RUN = RunOptions(sequence_length=256, dtype="fp32")
Config = Mapping[str, Any]
Case = tuple[str, int, str]
"""(schedule, chunks, recomputation)."""
CASES: tuple[Case, ...] = (
    ("gpipe", 1, "none"), ("1f1b", 1, "none"), ("1f1b", 1, "full"), ("1f1b", 1, "norm+activation+multiply"),
    ("interleaved", 2, "none"), ("zb-h1", 1, "none"),
)  # fmt: skip


def main(argument: str) -> None:
    rounds, output, run = json.loads(argument)
    open_process_group("gloo")
    torch.set_num_threads(1)
    config = named_model("llama-tiny").config
    rank_slice = ModelSlice(config, RUN, torch.device("cpu"))
    pipelines = [_pipeline(config, *case) for case in CASES]
    tokens = torch.randint(256, (MICRO_BATCHES, RUN.sequence_length + 1), generator=torch.Generator().manual_seed(0))
    measured: list[Measurements] = []
    messages: list[float] = []
    traces: list[list[db.Trace]] = [[] for _ in CASES]
    for round_ in range(rounds + 1):
        dist.barrier()
        part = rank_slice.measure(repetitions=1, warm_up=0 if round_ else 3)
        messages.append(message_time(rank_slice.boundary, repetitions=5))
        for pipeline, trace in zip(pipelines, traces, strict=True):
            pipeline.step(tokens)
            if round_:
                trace.append(pipeline.measured.gather_trace())
            pipeline.optimizer_step(1.0)
        if round_:
            measured.append(part)
    units = _units(config, rank_slice, measured, statistics.median(messages))
    if dist.get_rank() == 0:
        results = [_result(case, p, units, t) for case, p, t in zip(CASES, pipelines, traces, strict=True)]
        machine = {"cores": available_cores(), "load_average": os.getloadavg()[0], "torch": torch.__version__}
        content = {**run, "ranks_on": machine, "rounds": rounds, "cases": results}
        Path(output).write_text(json.dumps(content, indent=1) + "\n")


def _units(config: Config, rank_slice: ModelSlice, measured: list[Measurements], message: float) -> Units:
    parts: list[Measurements] = [{}] * RANKS
    dist.all_gather_object(parts, merge(measured))
    per_parameter = parameter_bytes(RUN, shards=1, gradient_bytes=4).total
    static = [per_parameter * sum(p.numel() for p in unit.parameters()) for unit in rank_slice.units]
    kinds = costs_of(rank_slice.planned, merge(parts), static=static, config=config)
    return Units(units=units_of_layers(kinds, config), communication=message)


def _pipeline(config: Config, schedule: str, chunks: int, strategy: str) -> Pipeline:
    """An even split of the units; the plan's costs do not matter to what runs."""
    stages = RANKS * chunks
    units = [replace(u, strategy=_strategy(u, strategy)) for u in ModelConfig.from_hf(config).units]
    at = [round(len(units) * s / stages) for s in range(stages + 1)]
    partition = tuple(tuple(units[a:b]) for a, b in itertools.pairwise(at))
    built = db.schedules[schedule](devices=RANKS, micro_batches=MICRO_BATCHES, chunks=chunks)
    recomputed = frozenset(s for s, held in enumerate(partition) if any(u.strategy != "none" for u in held))
    plan = db.Plan(
        planner="benchmark", schedule=replace(built, fused_recompute=recomputed), costs=db.StageCosts.of(stages=stages),
        lower_bound=0, partition=partition, options=RUN,
        model_on_cluster=ModelOnCluster(ModelConfig.from_hf(config), db.Cluster.parse(f"{RANKS}xCPU")),
    )  # fmt: skip
    pipeline = Pipeline(None, plan, optimizer=optimizer_maker("adamw", weight_decay=0.0))
    pipeline.measured.every_step = True
    return pipeline


def _strategy(unit: PlannedUnit, strategy: str) -> str:
    if unit.layer is None:
        return "none"
    return "norm" if "+" in strategy and unit.type == "attention" else strategy


def _result(case: Case, pipeline: Pipeline, units: Units, traces: list[db.Trace]) -> dict[str, Any]:
    schedule, chunks, strategy = case
    plan = pipeline.plan
    index = {(u.type, u.layer): i for i, u in enumerate(units.units)}
    partition = Partition([(index[u.type, u.layer], u.strategy) for u in stage] for stage in plan.partition)
    assert partition.recomputing == plan.schedule.fused_recompute
    costs = units.stage_costs(partition, plan.schedule.placement)
    trace = db.Trace(devices=RANKS, steps=tuple(replace(t.steps[0], step=i) for i, t in enumerate(traces)))
    comparison = compare(replace(plan, costs=costs), trace)
    step, static = comparison.makespan, costs.static
    activations = [
        {"predicted": pair.predicted - static[d], "measured": pair.measured - static[d]}
        for d, pair in enumerate(comparison.peak_memory)
    ]
    ratios = ", ".join(f"{pair['measured'] / pair['predicted']:.4f}" for pair in activations)
    print(
        f"{schedule:12} chunks {chunks} recompute {strategy:25} step {1e3 * step.measured:7.1f} ms, predicted"
        f" {1e3 * step.predicted:7.1f} ms, ratio {step.ratio:.3f}; activations, ratio {ratios}",
        flush=True,
    )
    return {
        "schedule": schedule, "chunks": chunks, "recompute": strategy,
        "step_seconds": vars(step) | {"ratio": step.ratio},
        "bubble_fraction": vars(comparison.bubble_fraction), "peak_activation_bytes": activations,
    }  # fmt: skip


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(main)
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rounds", type=int, default=40)
        parser.add_argument("--output", default="benchmarks/results/plan_vs_measured.json")
        given = parser.parse_args()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        launch("plan_vs_measured", json.dumps([given.rounds, given.output, measured_by()]), ranks=RANKS)
