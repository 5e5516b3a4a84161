"""What an operation costs beside plain autograd: debubble's runtime and torch.distributed.pipelining, on one device.

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import debubble as db
from debubble.ir import PlannedUnit, RunOptions, Schedule, StageCosts
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Alone
from on_gpu.figures import Figures
from on_gpu.profiles import DTYPES
from on_gpu.settings import Config, Settings

MICRO_BATCHES, STAGES = 8, 4
Step = Callable[[], Tensor]


class Block(nn.Module):
    """A Llama layer without positions, as anybody would write it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, ffn, self.heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        core = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(core.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        mlp: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + mlp


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
        blocks = [Block(config) for _ in range(config["num_hidden_layers"])]
        layers = [nn.Embedding(vocab, hidden), *blocks, nn.Linear(hidden, vocab, bias=False)]
    bounds = [round(len(layers) * s / STAGES) for s in range(STAGES + 1)]
    chunks = [nn.Sequential(*layers[a:b]).to(dtype) for a, b in itertools.pairwise(bounds)]
    tokens = torch.randint(
        config["vocab_size"], (MICRO_BATCHES, length + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    made = {
        "autograd": loop(fresh(chunks, compiler), tokens),
        "torch 1F1B": torchs("1F1B", [nn.Sequential(*fresh(chunks, compiler))], tokens, device),
        "debubble 1F1B": ours("1f1b", [nn.Sequential(*fresh(chunks, compiler))], tokens, settings, length),
        "torch Interleaved1F1B": torchs("Interleaved1F1B", fresh(chunks, compiler), tokens, device),
        "debubble interleaved": ours("interleaved", fresh(chunks, compiler), tokens, settings, length),
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
    """The loss of each way's first step, which compiles; of the ways that fail, why."""
    losses, failed = {}, {}
    for name, step in made.items():
        try:
            losses[name] = float(step())
        except Exception:
            failed[name] = {"failed": traceback.format_exc()}
    return losses, failed


def fresh(chunks: Sequence[nn.Module], compiler: str | None) -> list[nn.Module]:
    """Copies of their own, which share nothing."""
    copies = [copy.deepcopy(chunk) for chunk in chunks]
    for chunk in copies:
        if compiler is not None:
            chunk.compile(backend=compiler)
    return copies


def loss_of(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).float()
        return functional.cross_entropy(flat, targets.flatten(), reduction="sum") / count

    return loss


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


def torchs(kind: str, modules: Sequence[nn.Module], tokens: Tensor, device: torch.device) -> Step:
    stages = [PipelineStage(module, s, len(modules), device) for s, module in enumerate(modules)]
    given = stages[0] if len(stages) == 1 else stages
    schedule = get_schedule_class(kind)(given, MICRO_BATCHES, loss_fn=loss_of(tokens[:, 1:].numel()), scale_grads=False)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        for module in modules:
            module.zero_grad()
        losses: list[Tensor] = []
        schedule.step(inputs, target=targets, losses=losses)
        return torch.stack([loss.detach() for loss in losses]).sum()

    return step


def ours(kind: str, modules: Sequence[nn.Module], tokens: Tensor, settings: Settings, length: int) -> Step:
    schedule: Schedule = db.schedules[kind](devices=1, micro_batches=MICRO_BATCHES, chunks=len(modules))
    plan = Plan(
        planner="benchmark", schedule=schedule, costs=StageCosts.of(stages=len(modules)), lower_bound=0,
        partition=tuple((PlannedUnit("module", s),) for s in range(len(modules))),
        options=RunOptions(dtype=settings.dtype, sequence_length=length),
    )  # fmt: skip
    model = nn.Sequential(*(module.float() for module in modules))  # the masters
    pipeline = Pipeline(model, plan, transport=Alone(), device=tokens.device)

    def step() -> Tensor:
        for parameter in pipeline.parameters():
            parameter.grad = None
        return pipeline.step(tokens)

    return step


def rounds(made: dict[str, Step], device: torch.device, count: int) -> dict[str, list[float]]:
    """Seconds of every step, round after round in shuffled order."""
    order = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(count):
        for name in order.sample(list(made), len(made)):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            made[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[name].append(time.perf_counter() - start)
    return {name: times[min(2, count - 1) :] for name, times in found.items()}
