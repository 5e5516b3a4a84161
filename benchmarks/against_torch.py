"""A step of the runtime against torch.distributed.pipelining: same model, micro-batches, ranks.

Two ranks of one thread each, Gloo.  Every round runs both in shuffled order (the same on all ranks).  `ratio` is the
median over rounds of their step-time ratio, `cpu_ratio` the same of both ranks' CPU time; `best_ratio` and
`best_cpu_ratio` compare the fastest step of each: what a busy machine disturbs least.  `peak_mb` and `torch_peak_mb`
are the most that autograd and waiting weight gradients keep on any rank, in a step apart from the timed ones, counted
by one ledger (of torch's split backwards without the gradients that these keep outside of autograd).

Products are the same in both, MKL's, but in `own products`: there ours are oneDNN's where they are faster.

First schedule against the same schedule; then the same order with each whole backward as I and W, side by side, against
torch's whole backwards: the gradient goes on before the weights' are computed.  Then what debubble plans for the memory
of 1F1B (four micro-batches) or GPipe, with stages that are taken to be alike, against that schedule.

`python benchmarks/against_torch.py --only 1f1b` writes one case into `benchmarks/results/against_torch.json` in 80
seconds, and leaves the others there as they are; without `--only` it measures all. `--only operators` notes which of
torch's operators the CPU time of a step goes into, in both and in one process, by torch's profiler.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from provenance import measured_by
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torchs_layers import use_torchs_layers

import debubble as db
from debubble.ir import Schedule, StageCosts
from debubble.models import ModelConfig
from debubble.planners import FixedStages, Problem
from debubble.planners.plan_model import solve
from debubble.plans import ModelOnCluster, Plan
from debubble.runtime.memory.activations import Ledger, value
from debubble.runtime.memory.recomputation import directly
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.units import MicroBatch, UnitModule

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "rms_norm_eps": 1e-5,
}  # fmt: skip
RANKS, LENGTH, WARM_UP = 2, 256, 2


class Case(NamedTuple):
    """Two schedules that take the same step."""

    ours: str
    torchs: str
    micro_batches: int = 8
    splits: bool = False
    """Whether ours has I and W in the place of every B."""
    kept: int | None = None
    """Micro-batches whose activations a stage has room for."""
    onednn: bool = False
    """Whether ours may leave products to another library than torch's modules do."""


CASES = {
    "gpipe": Case("gpipe", "GPipe"),
    "1f1b": Case("1f1b", "1F1B"),
    "interleaved": Case("interleaved", "Interleaved1F1B"),
    "zb-v": Case("zb-v", "ZBVZeroBubble"),
    "gpipe, I and W": Case("gpipe", "GPipe", splits=True),
    "1f1b, I and W": Case("1f1b", "1F1B", splits=True),
    "interleaved, I and W": Case("interleaved", "Interleaved1F1B", splits=True),
    "gpipe, own products": Case("gpipe", "GPipe", onednn=True),
    "1f1b, own products": Case("1f1b", "1F1B", onednn=True),
    "interleaved, own products": Case("interleaved", "Interleaved1F1B", onednn=True),
    "zb-v, own products": Case("zb-v", "ZBVZeroBubble", onednn=True),
    "within gpipe's memory": Case("auto", "GPipe", kept=8),
    "within 1f1b's memory": Case("auto", "1F1B", 4, kept=RANKS),
}

OPERATORS = "operators"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


class Run(NamedTuple):
    """A way to take steps."""

    step: Callable[[Tensor], Any]
    clear: Callable[[], None]
    """Let go of the gradients."""
    peak: Callable[[Tensor], int]
    """Take a step, and count the most bytes that this rank keeps for the backward."""


class Chunk(nn.Module):
    """Some units as the plain module that torch's stages take; linear layers are torch's."""

    def __init__(self, units: Sequence[UnitModule]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        use_torchs_layers(units)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x, MicroBatch(), directly)
        return x


def schedule_of(case: Case) -> Schedule:
    """The library's schedule, or for `auto` the best one that keeps no more than the case has room for."""
    if case.ours != "auto":
        schedule = db.schedules[case.ours](devices=RANKS, micro_batches=case.micro_batches)
        return schedule.with_split_backwards() if case.splits else schedule
    costs = StageCosts.of(stages=RANKS, activation=1, memory_limit=case.kept)
    workload = FixedStages(costs)
    return solve(Problem(devices=RANKS, micro_batches=case.micro_batches, workload=workload, effort=2)).schedule


def plan_of(schedule: Schedule) -> Plan:
    units = ModelConfig.from_hf(CONFIG).units
    bounds = [round(i * len(units) / schedule.stages) for i in range(schedule.stages + 1)]
    partition = tuple(units[a:b] for a, b in itertools.pairwise(bounds))
    costs = StageCosts.of(stages=schedule.stages)
    return Plan(
        planner="benchmark", schedule=schedule, costs=costs, lower_bound=0, partition=partition,
        model_on_cluster=ModelOnCluster(ModelConfig.from_hf(CONFIG), db.Cluster.parse(f"{RANKS}xCPU")),
        options=db.ir.RunOptions(dtype="fp32", sequence_length=LENGTH),
    )  # fmt: skip


def ours(plan: Plan) -> Run:
    pipeline = db.Pipeline(None, plan)

    def clear() -> None:
        for parameter in pipeline.parameters():
            parameter.grad = None

    def peak(tokens: Tensor) -> int:
        pipeline.step(tokens)
        return pipeline.measured.peak_activation

    return Run(pipeline.step, clear, peak)


def torchs(plan: Plan, kind: str, rank: int) -> Run:
    placement = plan.schedule.placement
    assert plan.partition is not None
    modules = {s: Chunk(build_stage(CONFIG, plan.partition[s])) for s in placement.stages_of[rank]}
    stages = [PipelineStage(m, s, placement.stages, torch.device("cpu")) for s, m in modules.items()]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()

    single = len(stages) == 1
    schedule = get_schedule_class(kind)(stages[0] if single else stages, plan.micro_batches, loss_fn=loss_of)
    first, last = rank == 0, placement.device_of[-1] == rank

    def step(tokens: Tensor) -> None:
        arguments = (tokens[:, :-1].contiguous(),) if first else ()
        if last:
            losses: list[Tensor] = []
            schedule.step(*arguments, target=tokens[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step(*arguments)

    def clear() -> None:
        for module in modules.values():
            module.zero_grad()

    def peak(tokens: Tensor) -> int:
        ledger = Ledger()
        for module in modules.values():
            ledger.exclude((*module.parameters(), *module.buffers()))
        with saved_tensors_hooks(ledger.save, value):
            step(tokens)
        return ledger.peak

    return Run(step, clear, peak)


def times(runs: dict[str, Run], tokens: Tensor, rounds: int) -> dict[str, list[list[float]]]:
    """By name of a run: the seconds of each step, and the CPU seconds of both ranks."""
    order = random.Random(0)
    found: dict[str, list[list[float]]] = {who: [] for who in runs}
    for number in range(rounds + WARM_UP):
        for who in order.sample(list(runs), len(runs)):
            runs[who].clear()
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            runs[who].step(tokens)
            dist.barrier()
            wall, work = time.perf_counter() - start, torch.tensor(time.process_time() - cpu)
            dist.all_reduce(work)
            if number >= WARM_UP:
                found[who].append([wall, float(work)])
    return found


def kept_mb(run: Run, tokens: Tensor) -> float:
    """The most that a rank keeps in a step, in MB."""
    run.clear()
    peak = torch.tensor(float(run.peak(tokens)))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak) / 1e6


def figures_of(found: dict[str, list[list[float]]]) -> dict[str, float]:
    pairs = list(zip(found["debubble"], found["torch"], strict=True))
    ratio, cpu_ratio = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
    best, cpu_best = (min(a[i] for a, _ in pairs) / min(b[i] for _, b in pairs) for i in (0, 1))
    steps = {f"{who}_ms": 1e3 * statistics.median(wall for wall, _ in taken) for who, taken in found.items()}
    return {"ratio": ratio, "cpu_ratio": cpu_ratio, "best_ratio": best, "best_cpu_ratio": cpu_best, **steps}


def operators(folder: str, output: Path) -> None:
    """Note the seconds of a step in one process by torch's operators, in both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    plan = plan_of(db.schedules["gpipe"](devices=1, micro_batches=8))
    tokens = torch.randint(0, 1024, (8, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    figures = {}
    for who, run in {"debubble": ours(plan), "torch": torchs(plan, "GPipe", 0)}.items():
        run.step(tokens)
        run.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run.step(tokens)
        seconds = {event.key: event.self_cpu_time_total / 1e6 for event in profile.key_averages()}
        figures[who] = {
            "all": sum(seconds.values()),
            "products": sum(seconds.get(name, 0.0) for name in PRODUCTS),
            "attention": sum(time for name, time in seconds.items() if "scaled_dot_product" in name),
            "add_": seconds.get("aten::add_", 0.0),
        }
    note(OPERATORS, figures, output)
    dist.destroy_process_group()


def note(case: str, figures: dict[str, Any], output: Path) -> None:
    """Put a case into the result file, beside those that are there."""
    print(case, json.dumps(figures), file=sys.stderr)
    found = json.loads(output.read_text()) if output.exists() else {}
    there = {**found, case: {**measured_by(), **figures}}
    output.write_text(json.dumps({name: there[name] for name in (*CASES, OPERATORS) if name in there}, indent=1) + "\n")


def one(rank: int, folder: str, schedules: dict[str, Schedule], rounds: int, output: Path) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    for name, schedule in schedules.items():
        case, plan = CASES[name], plan_of(schedule)
        torch.backends.mkldnn.enabled = case.onednn  # type: ignore[assignment]
        tokens = torch.randint(0, 1024, (case.micro_batches, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        runs = {"debubble": ours(plan), "torch": torchs(plan, case.torchs, rank)}
        figures = {"schedule": schedule.name, **figures_of(times(runs, tokens, rounds))}
        figures |= {"peak_mb": kept_mb(runs["debubble"], tokens), "torch_peak_mb": kept_mb(runs["torch"], tokens)}
        if rank == 0:
            note(name, figures, output)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", action="append", choices=[*CASES, OPERATORS])
    parser.add_argument("-o", type=Path, default=Path(__file__).parent / "results" / "against_torch.json")
    options = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if name in (options.only or CASES)}
    if OPERATORS in (options.only or [OPERATORS]):
        operators(tempfile.mkdtemp(), options.o)
    schedules = {name: schedule_of(case) for name, case in cases.items()}
    if schedules:
        mp.spawn(one, args=(tempfile.mkdtemp(), schedules, options.rounds, options.o), nprocs=RANKS)


if __name__ == "__main__":
    main()
