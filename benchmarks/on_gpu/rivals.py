"""Tokens per second of one device that trains a few layers of Llama: transformers alone and debubble.

All train the same weights' shapes in bf16 on the same micro-batches with AdamW: transformers' model with torch's
attention, one stage under debubble's 1F1B, each with and without `torch.compile`.  transformers sums gradients in bf16
and keeps no fp32 copy of the weights, which debubble does: what each holds stands alongside.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from even_plan import even_plan
from torch import Tensor

import debubble as db
from debubble.costs import Cluster
from debubble.costs.flops import flops_per_token
from debubble.ir import RunOptions
from debubble.models import ModelConfig
from debubble.runtime import Pipeline
from on_gpu.figures import Figures
from on_gpu.machine import compared_hardware
from on_gpu.profiles import DTYPES
from on_gpu.settings import Config, Settings

MICRO_BATCHES, LAYERS = 4, 4
Step = Callable[[], Tensor]


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    config = {**settings.dense, "num_hidden_layers": LAYERS}
    for length in dict.fromkeys(settings.lengths):
        figures.add(f"{length} tokens", "model", figures={"config": config, "micro_batches": MICRO_BATCHES})
        for name, make in (("transformers", transformers_step), ("debubble", debubble_step)):
            for way, compiled in (("eager", False), ("compiled", True)):
                if settings.dry and compiled:
                    continue  # compilers take minutes, and tests already compile units
                work = partial(measured, make, config, length, settings, compiled=compiled)
                figures.measure(work, f"{length} tokens", f"{name}, {way}", needs=2 if settings.dry else 25)
                gc.collect()
                if settings.device == "cuda":
                    torch.cuda.empty_cache()


def measured(
    make: Callable[..., Step], config: Config, length: int, settings: Settings, *, compiled: bool
) -> dict[str, Any]:
    """Losses, median step in seconds, tokens per second, utilization, and peak memory."""
    on_gpu = settings.device == "cuda"
    torch.manual_seed(0)
    tokens = torch.randint(config["vocab_size"], (MICRO_BATCHES, length + 1)).to(settings.device)
    step = make(config, tokens, settings, compiled=compiled)
    losses = [float(step())]  # compiles
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(2 + settings.repetitions):
        start = time.perf_counter()
        losses.append(float(step()))
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    pace = MICRO_BATCHES * length / statistics.median(seconds[1:])
    flops = flops_per_token(ModelConfig.from_hf(config), length)
    return {
        "losses": losses, "tokens_per_second": pace, "mfu": pace * flops / compared_hardware(settings).flops,
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
    }  # fmt: skip


def transformers_step(config: Config, tokens: Tensor, settings: Settings, *, compiled: bool) -> Step:
    """A step of transformers' own model: micro-batch after micro-batch, then AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"})
    with torch.device(settings.device):
        model = LlamaForCausalLM._from_config(described, attn_implementation="sdpa", dtype=DTYPES[settings.dtype])
    if compiled:
        model.compile(backend=settings.compiler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=settings.device == "cuda")

    def step() -> Tensor:
        total = torch.zeros((), device=settings.device)
        for row in tokens.split(1):
            loss = model(input_ids=row[:, :-1], labels=row[:, :-1], use_cache=False).loss / len(tokens)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def debubble_step(config: Config, tokens: Tensor, settings: Settings, *, compiled: bool) -> Step:
    """A step of one stage under 1F1B, then AdamW."""
    schedule = db.schedules["1f1b"](devices=1, micro_batches=MICRO_BATCHES)
    cluster = Cluster.parse(f"1x{compared_hardware(settings).name}")
    options = RunOptions(dtype=settings.dtype, sequence_length=tokens.shape[1] - 1)
    plan = even_plan(schedule, ModelConfig.from_hf(config).units, options, model=config, cluster=cluster)
    pipeline = Pipeline(
        None, plan, device=torch.device(settings.device), compile=compiled,
        optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=settings.device == "cuda"),
    )  # fmt: skip

    def step() -> Tensor:
        loss = pipeline.step(tokens)
        pipeline.optimizer_step(1.0)
        return loss

    return step
