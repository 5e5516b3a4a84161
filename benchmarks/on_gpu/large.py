"""A model that needs offload or recomputation to fit, and trains with either.

Everything is on the one device: four stages, one micro-batch.  Kept whole it ends for want of memory; then the same
model learns sequences that count, with all stages recomputed, and with the first three offloaded.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from even_plan import even_plan

from debubble.costs import Cluster
from debubble.ir import Kind, Op, Placement, RunOptions, Schedule, StageCosts
from debubble.models import ModelConfig
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.launch.failures import DeviceMemoryError, is_out_of_memory
from on_gpu.figures import Figures
from on_gpu.machine import compared_hardware
from on_gpu.settings import Settings

STAGES = 4
BYTES_OF_A_ROW = 16e9
"""Device memory per sequence: its activations and logits if everything is kept."""


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    if settings.device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        settings = replace(settings, large_rows=round(memory / BYTES_OF_A_ROW))
    config, rows, length = settings.large, settings.large_rows, settings.large_length
    figures.add("model", figures={"config": config, "rows": rows, "sequence_length": length, "dtype": settings.dtype})
    for name in ("kept", "recomputed", "offloaded"):
        needs = 10 if settings.dry else 20
        figures.measure(partial(train, name, settings), name, needs=needs)
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def plan_of(way: str, settings: Settings) -> Plan:
    """One micro-batch through all stages and back."""
    stages, last = range(STAGES), STAGES - 1
    order = [Op(Kind.F, s, 0) for s in stages] + [Op(Kind.B, s, 0) for s in reversed(stages)]
    if way == "offloaded":
        order = [op for s in range(last) for op in (Op(Kind.F, s, 0), Op(Kind.O, s, 0))]
        order += [Op(Kind.F, last, 0)]
        for s in reversed(stages):
            order += [Op(Kind.L, s - 1, 0), Op(Kind.B, s, 0)] if s else [Op(Kind.B, 0, 0)]
    schedule = Schedule.of(way, Placement.of([0] * STAGES), 1, [order])
    strategy = "none"
    if way == "recomputed":
        schedule, strategy = replace(schedule, fused_recompute=frozenset(stages)), "full"
    units = [
        replace(u, strategy=strategy if u.layer is not None else "none")
        for u in ModelConfig.from_hf(settings.large).units
    ]
    costs = StageCosts.of(stages=STAGES, activation=3, offload=1)
    cluster = Cluster.parse(f"1x{compared_hardware(settings).name}")
    if way == "offloaded":
        costs = costs.with_limit(6)  # two stages of four at a time
    options = RunOptions(
        dtype=settings.dtype, sequence_length=settings.large_length, micro_batch_size=settings.large_rows
    )
    return even_plan(schedule, units, options, model=settings.large, costs=costs, cluster=cluster)


def train(way: str, settings: Settings) -> dict[str, Any]:
    """A few steps of AdamW."""
    plan, on_gpu = plan_of(way, settings), settings.device == "cuda"
    make = partial(torch.optim.AdamW, lr=3e-4, fused=on_gpu)
    pipeline = Pipeline(None, plan, device=torch.device(settings.device), optimizer=make)
    losses, seconds = [], []
    for step in range(settings.large_steps):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            losses.append(float(pipeline.step(counting(settings, step))))
            pipeline.optimizer_step(1.0)
        except (DeviceMemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            return {"fits": False, "sentence": str(error), "static": pipeline.measured.static_bytes}
        seconds.append(pipeline.measured.trace().steps[0].makespan)
        if settings.large_limit is not None and pipeline.measured.peak_memory > settings.large_limit:
            peak = pipeline.measured.peak_memory
            sentence = f"{peak} bytes at a time are more than the {settings.large_limit:.0f} of this dry run"
            return {"fits": False, "sentence": sentence, "static": pipeline.measured.static_bytes}
    return {
        "fits": True, "losses": losses, "static": pipeline.measured.static_bytes,
        "activations": pipeline.measured.peak_activation, "offloaded": pipeline.measured.peak_offloaded,
        "tokens_per_second": settings.large_rows * settings.large_length / sorted(seconds[1:])[len(seconds[1:]) // 2],
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
    }  # fmt: skip


def counting(settings: Settings, step: int) -> torch.Tensor:
    """Sequences that count up from a random token, so that each token determines the next."""
    rows, length = settings.large_rows, settings.large_length
    vocab: int = settings.large["vocab_size"]
    starts = torch.randint(vocab, (rows, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(length + 1)) % min(vocab, 512)
