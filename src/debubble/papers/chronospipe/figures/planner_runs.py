"""ChronosPipe's Figures 10 and 12 computed with debubble's planners and cost model, without fitted inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from debubble.costs import Cluster, model_units
from debubble.costs.flops import Utilization
from debubble.formatting import mfu_words
from debubble.ir import InfeasibleError, RunOptions
from debubble.models import Model, models
from debubble.papers.chronospipe.figures.memory_model import GB, LIMIT
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Table
from debubble.planners import planners
from debubble.planners.problem import ModelUnits, Problem
from debubble.simulator import Timeline, simulate

PAPER = PrintedPaper.load("chronospipe")

CLUSTER = Cluster.parse("64xH100-80GB")
PIPELINE = TENSOR = 8
EFFORT = 2.0
"""Search effort of every planner, in seconds of the reference machine."""


@dataclass(frozen=True)
class PlannedStep:
    """A training step to plan, on 8 pipeline stages of 8 devices each."""

    model: Model
    micro_batches: int
    options: RunOptions

    def planned(self, planner: str, limit: float) -> Timeline | None:
        """Simulate the planned pipeline under a limit in bytes per device; None if nothing fits."""
        units = model_units(self.model, CLUSTER, self.options, pipeline=PIPELINE)
        # As in the paper, an offload starts after its full forward, and a reload ends before its backward.
        workload = ModelUnits(replace(units, memory_limit=(limit,), streams=False))
        problem = Problem(devices=PIPELINE, micro_batches=self.micro_batches, workload=workload, effort=EFFORT)
        try:
            solution = planners[planner].find(problem)
            return simulate(solution.schedule, solution.costs)
        except InfeasibleError:
            return None

    def without_limit(self, planner: str) -> Timeline:
        """Simulate the planned pipeline without a memory limit."""
        run = self.planned(planner, 1e15)
        assert run is not None, "there is memory enough"
        return run

    def mfu(self, timeline: Timeline) -> str:
        """Model FLOPs utilization over the pipeline's makespan."""
        tokens = self.micro_batches * self.options.micro_batch_size * self.options.sequence_length
        used = Utilization.of_run(self.model, CLUSTER, self.options, devices=CLUSTER.count)
        return mfu_words(used.mfu(tokens / float(timeline.makespan)))


@cache
def figure_10() -> Table:
    """Figure 10's model, planned within the memory that corresponds to each method's saving."""
    model = Model.from_hf({**models["gpt3-175b"].config, "n_positions": 16384})
    job = PlannedStep(model, 32, RunOptions(sequence_length=16384, tensor=TENSOR))
    full = job.without_limit("dapple+")
    peak = float(max(job.without_limit("dapple").peak_memory))
    rows = []
    for name, saving, *speed in PAPER.printed["figure-10"]:
        run = job.planned(name, math.ceil(peak / saving))
        rows.append(
            (name, saving, round(peak / saving / GB, 1), speed[0] if speed else None, *_alongside(job, run, full))
        )
    return PAPER.table("figure-10", rows, peak=peak / GB)


def _alongside(job: PlannedStep, run: Timeline | None, full: Timeline) -> tuple[Cell, Cell]:
    """A run's speed-up over full recomputation, and its MFU; None if it does not fit."""
    if run is None:
        return None, None
    return round(float(full.makespan / run.makespan), 3), job.mfu(run)


def forward_time(sequence_length: int) -> float:
    """Forward time of a layer of LLaMA2-70B in seconds, by our cost model."""
    options = RunOptions(sequence_length=sequence_length, tensor=TENSOR, micro_batch_size=2)
    attention, mlp = model_units(models["llama2-70b"], CLUSTER, options, pipeline=PIPELINE).units[1:3]
    return float(attention.forward + mlp.forward)


def models_12() -> Mapping[str, Model]:
    """Figure 12's models; PaLM and OPT are built from families that differ only in norm or activation function."""
    shapes = {name: Model.from_hf(config) for name, config in PAPER.printed["models"].items()}
    return {"Qwen2.5-32B": models["qwen2.5-32b"], **shapes}


PLANNERS_12 = ("dapple", "dapple+", "adapipe", "chronos")


@cache
def figure_12() -> Table:
    """Figure 12's models, planned within the paper's 32 GB and batch of 128."""
    rows: list[tuple[Cell, ...]] = []
    for name, model in models_12().items():
        job = PlannedStep(model, 64, RunOptions(sequence_length=4096, tensor=TENSOR, micro_batch_size=2))
        full = job.without_limit("dapple+")
        for planner in PLANNERS_12:
            run = job.planned(planner, LIMIT * GB)
            gigabytes = None if run is None else round(float(max(run.peak_memory)) / GB, 1)
            paper = "about 1.15" if planner == "chronos" else None
            rows.append((name, planner, gigabytes, paper, *_alongside(job, run, full)))
    return PAPER.table("figure-12", rows, limit=LIMIT)
