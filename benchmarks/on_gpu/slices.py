"""One device's program of a long sequence, in full and in slices: the cost and the savings of slicing.

A few layers with head and loss train on one sequence.  Both ways have the same loss; slices take more launches and
smaller products, and keep as much, as a device alone has nobody to hand slices on to.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from even_plan import even_plan

import debubble as db
from debubble.costs import Cluster
from debubble.ir import RunOptions
from debubble.models import ModelConfig
from debubble.plans import Plan
from debubble.runtime import Pipeline
from on_gpu.figures import Figures
from on_gpu.large import counting
from on_gpu.machine import compared_hardware
from on_gpu.settings import Settings

SLICES = (1, 8)
FULL_LENGTH, LAYERS = 32_768, 4


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    if not settings.dry:
        settings = replace(settings, large_length=FULL_LENGTH)
    settings = replace(settings, large={**settings.large, "num_hidden_layers": LAYERS}, large_rows=1)
    figures.add("model", figures={"config": settings.large, "sequence_length": settings.large_length})
    for slices in SLICES:
        figures.measure(partial(train, slices, settings), f"{slices} slices", needs=10)
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def plan_of(slices: int, settings: Settings) -> Plan:
    """One sequence through one stage and back."""
    schedule = db.schedules["seq1f1b"](devices=1, micro_batches=1, slices=slices)
    options = RunOptions(dtype=settings.dtype, sequence_length=settings.large_length, slices=slices)
    cluster = Cluster.parse(f"1x{compared_hardware(settings).name}")
    units = ModelConfig.from_hf(settings.large).units
    return even_plan(schedule, units, options, model=settings.large, cluster=cluster)


def train(slices: int, settings: Settings) -> dict[str, Any]:
    """A few steps of AdamW."""
    on_gpu = settings.device == "cuda"
    pipeline = Pipeline(
        None, plan_of(slices, settings), device=torch.device(settings.device),
        optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=on_gpu),
    )  # fmt: skip
    losses, seconds = [], []
    for step in range(settings.large_steps):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(pipeline.step(counting(settings, step))))
        seconds.append(pipeline.measured.trace().steps[0].makespan)
        pipeline.optimizer_step(1.0)
    return {
        "losses": losses, "seconds": sorted(seconds[1:])[len(seconds[1:]) // 2],
        "activations": pipeline.measured.peak_activation,
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
    }  # fmt: skip
