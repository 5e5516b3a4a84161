"""Cost of an operation beyond plain autograd: debubble's runtime and torch.distributed.pipelining on one device.

All run the same modules on the same micro-batches, in shuffled rounds: a loop over micro-batches with autograd alone,
one stage under 1F1B, and four stages of one device under interleaved 1F1B, each with and without torch.compile.  What a
step takes beyond the loop, divided by its forwards and backwards, is the overhead of an operation.  Gradients of bf16
parameters are summed in fp32 here and in bf16 by the others.
"""

from __future__ import annotations

import copy
import itertools
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pipelines import Block, Step, debubbles, loss_of, torchs
from torch import Tensor, nn

import debubble as db
from debubble.runtime.distributed.transport import SingleProcessTransport
from on_gpu.figures import Figures
from on_gpu.profiles import DTYPES
from on_gpu.settings import Config, Settings

MICRO_BATCHES, STAGES = 8, 4


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # torch 2.11's pipelines send to their own rank, which Gloo refuses
        backend = "gloo" if settings.dry else "nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        for name, config, length in settings.overhead:
            for way, compiler in (("eager", None), ("compiled", settings.compiler)):
                work = partial(overheads, config, length, settings, compiler=compiler)
                figures.measure(work, name, way, needs=10 if settings.dry else 30)
        dist.destroy_process_group()


def overheads(config: Config, length: int, settings: Settings, *, compiler: str | None) -> dict[str, Any]:
    """Median step times in seconds, and seconds per operation beyond the loop; losses, which must agree."""
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    torch.manual_seed(0)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    with device:
        sizes = hidden, config["intermediate_size"], config["num_attention_heads"]
        blocks = [Block(*sizes) for _ in range(config["num_hidden_layers"])]
        layers = [nn.Embedding(vocab, hidden), *blocks, nn.Linear(hidden, vocab, bias=False)]
    bounds = [round(len(layers) * s / STAGES) for s in range(STAGES + 1)]
    chunks = [nn.Sequential(*layers[a:b]).to(dtype) for a, b in itertools.pairwise(bounds)]
    tokens = torch.randint(
        config["vocab_size"], (MICRO_BATCHES, length + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    undivided, parts = partial(fresh, [nn.Sequential(*chunks)], compiler), partial(fresh, chunks, compiler)

    def ours(kind: str, modules: Sequence[nn.Module]) -> Step:
        schedule = db.schedules[kind](devices=1, micro_batches=MICRO_BATCHES, chunks=len(modules))
        masters = [module.float() for module in modules]
        return debubbles(
            schedule, masters, tokens, dtype=settings.dtype, transport=SingleProcessTransport(), device=device
        )

    def theirs(kind: str, modules: Sequence[nn.Module]) -> Step:
        return torchs(kind, dict(enumerate(modules)), len(modules), MICRO_BATCHES, tokens)

    made = {
        "autograd": loop(parts(), tokens),
        "torch 1F1B": theirs("1F1B", undivided()),
        "debubble 1F1B": ours("1f1b", undivided()),
        "torch Interleaved1F1B": theirs("Interleaved1F1B", parts()),
        "debubble interleaved": ours("interleaved", parts()),
    }
    losses, failed = first_losses(made)
    made = {name: made[name] for name in losses}
    times = rounds(made, device, 3 + settings.repetitions)
    plain = statistics.median(times["autograd"])
    counts = {name: 2 * MICRO_BATCHES * (STAGES if "nterleaved" in name else 1) for name in made}
    measured = {
        name: {
            "step_seconds": statistics.median(taken),
            "best_seconds": min(taken),
            "per_operation": (statistics.median(taken) - plain) / counts[name],
            "loss": losses[name],
        }
        for name, taken in times.items()
    }
    return measured | failed


def first_losses(made: dict[str, Step]) -> tuple[dict[str, float], dict[str, Any]]:
    """Loss of the first step, which compiles, for each way; the error of those that fail."""
    losses, failed = {}, {}
    for name, step in made.items():
        try:
            losses[name] = float(step())
        except Exception:
            failed[name] = {"failed": traceback.format_exc()}
    return losses, failed


def fresh(chunks: Sequence[nn.Module], compiler: str | None) -> list[nn.Module]:
    """Copies that share nothing."""
    copies = [copy.deepcopy(chunk) for chunk in chunks]
    for chunk in copies:
        if compiler is not None:
            chunk.compile(backend=compiler)
    return copies


def loop(chunks: Sequence[nn.Module], tokens: Tensor) -> Step:
    model, loss = nn.Sequential(*chunks), loss_of(tokens[:, 1:].numel())

    def step() -> Tensor:
        model.zero_grad()
        total = torch.zeros((), device=tokens.device)
        for row in tokens.split(1):
            one = loss(model(row[:, :-1].contiguous()), row[:, 1:].contiguous())
            one.backward()
            total += one.detach()
        return total

    return step


def rounds(made: dict[str, Step], device: torch.device, count: int) -> dict[str, list[float]]:
    """Seconds of every step, in rounds of shuffled order."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(count):
        for name in order.sample(list(made), len(made)):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            made[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[min(2, count - 1) :] for name, times in seconds.items()}
