"""Within V-Half's memory: what debubble plans against every schedule of torch.distributed.pipelining, on real ranks.

    python benchmarks/within_memory.py [--instance 4x8] [--instance 8x16] [--steps 3]

Ranks are processes that talk Gloo.  A stage's module sleeps for its times (F, I, W = 10, 11, 9 units; sleeping takes no
core, so any machine will do) and saves real tensors; each of two chunks of a device takes half the time and saves half
the bytes.  Both runtimes run the same modules and leave weight gradients for later in the same way (torch's stages by
`dw_builder`), and one ledger counts what autograd and the weight gradients keep.

The limit is what V-Half keeps at most, as debubble's runtime counts it.  What keeps more under torch may take fewer
micro-batches at a time, several times a step, and schedules with whole backwards may recompute their stages.  So every
schedule of torch's that takes so few has a way to fit, and the plan is compared with the fastest.  Not counted, to
torch's advantage: what a stage that recomputes brings back, and messages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from provenance import measured_by
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import debubble as db
from debubble.ir import PlannedUnit, RunOptions, StageCosts
from debubble.planners import FixedStages, Problem
from debubble.planners.plan_model import solve
from debubble.plans import Plan
from debubble.runtime.memory.activations import Ledger, value
from debubble.runtime.operators import Deferred, Deferring, WeightGradStore, call

UNIT = 0.006
"""Seconds of a unit of time."""
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COMMUNICATION = 10, 11, 9, 1
LENGTH, WIDTH = 2048, 16
MESSAGE = 4 * LENGTH * WIDTH
"""Bytes that stages hand on, and that W needs of the input and of the output's gradient each."""
KEPT = 8
"""Messages' sizes that a stage keeps of a micro-batch, if it is the only one of its device."""
INSTANCES = ("4x8", "4x16", "8x16")
"""Devices and micro-batches."""


class TorchSchedule(NamedTuple):
    """One of torch.distributed.pipelining's schedules."""

    name: str
    like: str
    """A schedule of debubble's whose stages lie as its stages do."""
    splits: bool = False


TORCH = (
    TorchSchedule("GPipe", "gpipe"),
    TorchSchedule("1F1B", "1f1b"),
    TorchSchedule("LoopedBFS", "interleaved"),
    TorchSchedule("Interleaved1F1B", "interleaved"),
    TorchSchedule("InterleavedZeroBubble", "interleaved", splits=True),
    TorchSchedule("ZBVZeroBubble", "zb-v", splits=True),
    TorchSchedule("DualPipeV", "zb-v", splits=True),
)


class _Sleep(Function):
    """Sleeps in forward and backward; saves its input if the stage recomputes, else more bytes than the input has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage) -> Tensor:
        stage.sleep(FORWARD)
        ctx.stage = stage
        ctx.save_for_backward(
            *([x] if stage.recomputes else [x.new_zeros(stage.kept - 1, *x.shape), torch.zeros_like(x)])
        )
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        stage, gradient = ctx.stage, gradients[0].contiguous()
        *_, x = ctx.saved_tensors
        if stage.recomputes:
            stage.sleep(FORWARD)
        stage.sleep(BACKWARD_INPUT)
        stage.weight_grads.put(stage.compute_weight_gradients, x, gradient)
        return gradient, None


class SleepingStage(Deferring):
    """A stage that sleeps for its times.

    Args:
        chunks: Stages of its device.
        recomputes: Whether it keeps its input alone.
    """

    def __init__(self, chunks: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.chunks, self.kept, self.recomputes, self.awake = chunks, KEPT // chunks, recomputes, False
        # What the first stage computes from it needs a gradient, as all other inputs do.
        self.origin = nn.Parameter(torch.zeros(()))

    def sleep(self, units: float) -> None:
        """Take the time of an operation."""
        if not self.awake:
            time.sleep(UNIT * units / self.chunks)

    def compute_weight_gradients(self, x: Tensor, gradient: Tensor) -> None:
        """Take the time of W."""
        self.sleep(BACKWARD_WEIGHT)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [rows, length] or hidden states [rows, length, width] to hidden states."""
        x = x if x.is_floating_point() else self.origin.expand(*x.shape, WIDTH)
        return call(_Sleep, x, self)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """A loss that saves nothing."""
    return output.sum()


def costs_of(stages: int, chunks: int, limit: float | None = None) -> StageCosts:
    """The costs of the stages, in units of time and of a message's bytes."""
    return StageCosts.of(
        stages=stages, forward=FORWARD / chunks, backward_input=BACKWARD_INPUT / chunks,
        backward_weight=BACKWARD_WEIGHT / chunks, communication=COMMUNICATION, activation=KEPT / chunks,
        activation_after_input=2, activation_recomputed=1, memory_limit=limit,
    )  # fmt: skip


def plans_of(devices: int, micro_batches: int, effort: float) -> dict[str, Plan]:
    """V-Half, and what debubble plans for two chunks per device within its memory."""
    costs = costs_of(2 * devices, 2)
    schedule = db.schedules["v-half"](devices=devices, micro_batches=micro_batches, costs=costs)
    limit = float(max(db.simulate(schedule, costs).peak_memory))
    partition = tuple((PlannedUnit("stage", s, "full"),) for s in range(2 * devices))
    run = RunOptions(dtype="fp32", sequence_length=LENGTH)
    v_half = Plan(planner="benchmark", schedule=schedule, costs=costs, lower_bound=0, partition=partition, options=run)
    workload = FixedStages(costs_of(2 * devices, 2, limit))
    problem = Problem(devices=devices, micro_batches=micro_batches, chunks=2, workload=workload, effort=effort)
    planned = solve(problem, options=run)
    return {"v-half": v_half, "planned": replace(planned, partition=partition)}


class Run(NamedTuple):
    """A way to take a step."""

    step: Callable[[], Any]
    stages: Sequence[SleepingStage]
    peak: Callable[[], int]


def ours(plan: Plan, rank: int) -> Run:
    """A step of debubble's runtime."""
    stages = [SleepingStage(2) for _ in range(plan.schedule.stages)]
    pipeline = db.Pipeline(nn.Sequential(*stages), plan, loss=loss_of)
    tokens = torch.zeros(plan.micro_batches, LENGTH + 1, dtype=torch.int64)
    return Run(lambda: pipeline.step(tokens), stages, lambda: pipeline.measured.peak_activation)


def torchs(kind: TorchSchedule, devices: int, rank: int, *, taken: int, times: int, recomputes: bool) -> Run:
    """A step of torch's runtime: `taken` micro-batches, that many times.  Raises ValueError if the schedule cannot."""
    placement = db.schedules[kind.like](devices=devices, micro_batches=devices).placement
    ledger, queue, weight_grads = Ledger(), list[Deferred](), WeightGradStore()
    if kind.splits:
        weight_grads.collect_in(ledger, queue)
    own = placement.stages_of[rank]
    modules = [SleepingStage(len(own), recomputes=recomputes) for _ in own]
    for module in modules:
        ledger.exclude(module.parameters())
        module.weight_grads = weight_grads

    def weights_later() -> Callable[[], None]:
        left = list(queue)
        queue.clear()

        def run() -> None:
            while left:
                left.pop(0)()

        return run

    stages = [
        PipelineStage(m, s, placement.stages, torch.device("cpu"), dw_builder=weights_later if kind.splits else None)
        for m, s in zip(modules, own, strict=True)
    ]
    chosen = get_schedule_class(kind.name)
    schedule = chosen(stages[0] if len(stages) == 1 else stages, taken, loss_fn=loss_of)
    tokens = torch.zeros(taken, LENGTH, dtype=torch.int64)
    inputs = (tokens,) if 0 in own else ()
    last = {"target": tokens, "losses": []} if placement.stages - 1 in own else {}

    def step() -> None:
        ledger.start_step()
        with saved_tensors_hooks(ledger.save, value):
            for _ in range(times):
                schedule.step(*inputs, **last, return_outputs=False)

    return Run(step, modules, lambda: ledger.peak)


def kept(run: Run) -> float:
    """The most that a rank keeps in a step without sleep, in a message's bytes."""
    for stage in run.stages:
        stage.awake = True
    run.step()
    peak = torch.tensor(float(run.peak()))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    for stage in run.stages:
        stage.awake = False
    return float(peak) / MESSAGE


def seconds(run: Run, steps: int) -> list[float]:
    """The steps' times, shortest first."""
    found = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        run.step()
        dist.barrier()
        found.append(time.perf_counter() - start)
    return sorted(found)


def fitting(
    kind: TorchSchedule, devices: int, rank: int, *, micro_batches: int, recomputes: bool, limit: float
) -> tuple[Run, dict[str, Any]] | None:
    """The way to take a step within the limit that takes most micro-batches at a time, if there is one."""
    for times in range(1, micro_batches + 1):
        if micro_batches % times:
            continue
        taken = micro_batches // times
        try:
            run = torchs(kind, devices, rank, taken=taken, times=times, recomputes=recomputes)
        except ValueError:  # it takes other numbers of micro-batches alone
            continue
        peak = kept(run)
        if peak <= limit:
            return run, {"recomputes": recomputes, "at a time": taken, "peak": peak}
    return None


def rows_of(
    plans: dict[str, Plan], rank: int, *, devices: int, micro_batches: int, steps: int
) -> Iterator[dict[str, Any]]:
    """One row for each way to take the step; the first is V-Half, whose peak is the limit."""
    limit = math.inf
    for name, plan in plans.items():
        run = ours(plan, rank)
        peak = kept(run)
        limit = min(limit, peak)
        predicted = UNIT * float(plan.simulate().makespan)
        yield {"runtime": "debubble", "schedule": name, "peak": peak, "predicted": predicted, "s": seconds(run, steps)}
    for kind, recomputes in itertools.product(TORCH, (False, True)):
        if not (recomputes and kind.splits):
            found = fitting(kind, devices, rank, micro_batches=micro_batches, recomputes=recomputes, limit=limit)
            row = {"runtime": "torch", "schedule": kind.name}
            yield row | ({"fits": False} if found is None else found[1] | {"s": seconds(found[0], steps)})


def one(rank: int, devices: int, micro_batches: int, plans: dict[str, Plan], steps: int, folder: str) -> None:
    """One rank; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=devices)
    rows = []
    for row in rows_of(plans, rank, devices=devices, micro_batches=micro_batches, steps=steps):
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), file=sys.stderr, flush=True)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan beside the fastest of torch's that fits, by the medians of their steps."""
    step = {row["schedule"] + " recomputed" * row.get("recomputes", False): row for row in rows if "s" in row}
    medians = {name: statistics.median(row["s"]) for name, row in step.items() if row["runtime"] == "torch"}
    best = min(medians, key=lambda name: medians[name])
    plan = statistics.median(step["planned"]["s"])
    return {
        "torch's best that fits": best, "its seconds": medians[best], "its peak": step[best]["peak"],
        "plan's seconds": plan, "plan's peak": step["planned"]["peak"], "times as fast": medians[best] / plan,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instance", action="append", metavar="DEVICESxMICRO-BATCHES")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--effort", type=float, default=5.0)
    parser.add_argument("-o", type=Path, default=Path(__file__).parent / "results" / "within_memory.json")
    options = parser.parse_args()
    settings = {
        "unit_seconds": UNIT, "forward": FORWARD, "backward_input": BACKWARD_INPUT, "backward_weight": BACKWARD_WEIGHT,
        "communication": COMMUNICATION, "message_bytes": MESSAGE, "stage_keeps": KEPT, "effort": options.effort,
    }  # fmt: skip
    instances = json.loads(options.o.read_text())["instances"] if options.o.exists() else {}
    for instance in options.instance or INSTANCES:
        devices, micro_batches = map(int, instance.split("x"))
        plans = plans_of(devices, micro_batches, options.effort)
        folder = tempfile.mkdtemp()
        mp.spawn(one, args=(devices, micro_batches, plans, options.steps, folder), nprocs=devices)
        rows = json.loads((Path(folder) / "rows.json").read_text())
        instances[instance] = {**measured_by(), **compared(rows), "rows": rows}
        print(instance, json.dumps(compared(rows)))
        options.o.write_text(json.dumps({**settings, "instances": instances}, indent=1) + "\n")


if __name__ == "__main__":
    main()
