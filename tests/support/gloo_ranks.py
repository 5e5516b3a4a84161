"""Functions of spawned Gloo ranks; `spawn` starts ranks that find each other through a file."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from debubble.ir import lower
from debubble.plans import Plan
from debubble.runtime import Pipeline
from tests.support.forked import START_METHOD
from tests.support.runtime_cases import assert_gradients, reference_gradients


def spawn(ranks: Any, work: Any, *arguments: Any) -> Any:
    """`work(rank, folder, *arguments)` on every rank, in a process group; returns the folder of their answers."""
    folder = Path(tempfile.mkdtemp())
    mp.start_processes(_one, args=(ranks, work, folder, arguments), nprocs=ranks, start_method=START_METHOD)
    return folder


def assert_gradients_over_gloo(plans: Any, batches: Any, folder: Path) -> None:
    """Check that ranks in processes have the loss and gradients of one process, and trace all instructions."""
    paths = [folder / f"plan{index}.json" for index in range(len(plans))]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    answers = spawn(plans[0].ranks, gradients, paths, batches)
    parts = [torch.load(answers / f"rank{rank}.pt") for rank in range(plans[0].ranks)]
    for plan, tokens, by_rank in zip(plans, batches, zip(*parts, strict=True), strict=True):
        expected_loss, expected = reference_gradients(plan.model, tokens, micro_batches=plan.micro_batches)
        assert expected.keys() - {name for _, gradients, _ in by_rank for name in gradients} <= {"lm_head.weight"}
        for loss, actual, events in by_rank:
            torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
            assert plan.ranks > plan.devices or events == len(lower(plan.schedule, plan.costs).instructions)
            assert_gradients(actual, expected)


def assert_norm_over_gloo(plan: Any, tokens: Any, folder: Path) -> None:
    """Check that ranks in processes, whose replicas have the same rows, have the loss and norm of one process."""
    plan.save(folder / "plan.json")
    answers = spawn(plan.ranks, loss_and_norm, folder / "plan.json", tokens)
    loss, expected = reference_gradients(plan.model, tokens, micro_batches=plan.micro_batches)
    distinct = {id(gradient): gradient for gradient in expected.values()}.values()
    norm = torch.stack([gradient.square().sum() for gradient in distinct]).sum().sqrt()
    for rank in range(plan.ranks):
        answer = torch.load(answers / f"rank{rank}.pt")
        torch.testing.assert_close(torch.stack(answer), torch.stack([loss, norm]), rtol=1e-12, atol=0)


def _one(rank: Any, ranks: Any, work: Any, folder: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    work(rank, folder, *arguments)
    dist.destroy_process_group()


def gradients(rank: Any, folder: Any, plans: Any, batches: Any, compile: Any = False) -> None:
    """Save every plan's gradients and loss by rank."""
    answers = []
    for path, tokens in zip(plans, batches, strict=True):
        pipeline = Pipeline(None, Plan.load(path), compile=compile)
        loss = pipeline.step(tokens)
        trace = pipeline.measured.gather_trace()
        answers.append((loss, {n: p.grad for n, p in pipeline.named_parameters()}, len(trace.steps[0].events)))
    torch.save(answers, folder / f"rank{rank}.pt")


def die_in_the_second_step(rank: Any, folder: Any, plan: Any, tokens: Any) -> None:
    """Rank 1 dies silently; rank 0 writes the error that it gets."""
    pipeline = Pipeline(None, Plan.load(plan))
    pipeline.step(tokens)
    if rank == 1:
        os._exit(0)
    try:
        pipeline.step(tokens)
    except RuntimeError as error:
        (folder / "told").write_text(str(error))
    os._exit(0)


def loss_and_norm(rank: Any, folder: Any, plan: Any, tokens: Any) -> None:
    """Save loss and norm of one step by rank."""
    pipeline = Pipeline(None, Plan.load(plan))
    torch.save([pipeline.step(tokens), pipeline.clip_grad_norm(float("inf"))], folder / f"rank{rank}.pt")


def as_torch_sees_them(rank: Any, folder: Any, plans: Any, tokens: Any) -> None:
    """Save what torch's tools see of the parameters of each plan after one step, by rank."""
    answers = {}
    for name, path in plans.items():
        pipeline = Pipeline(None, Plan.load(path))
        pipeline.step(tokens)
        named: dict[str, Any] = dict(pipeline.named_parameters())
        mesh = pipeline.ranks.mesh
        assert mesh is not None
        answer = answers[name] = {"mesh": dict(zip(("dp", "pp", "tp"), mesh.shape, strict=True))}
        answer["gradients"] = {name: p.grad.full_tensor() for name, p in named.items()}
        norm: Any = torch.nn.utils.clip_grad_norm_(pipeline.parameters(), float("inf"))
        answer["norm"] = norm.full_tensor()
        if name == "llama":
            dcp.save(named, checkpoint_id=folder / "checkpoint")
            answer["before"] = {name: p.full_tensor().detach() for name, p in named.items()}
            torch.optim.Muon([p for p in pipeline.parameters() if p.dim() == 2], lr=0.1).step()
            answer["after"] = {name: p.full_tensor().detach() for name, p in named.items()}
            dcp.load(named, checkpoint_id=folder / "checkpoint")
            answer["again"] = {name: p.full_tensor().detach() for name, p in named.items()}
    torch.save(answers, folder / f"rank{rank}.pt")


def trained(rank: Any, folder: Any, plans: Any, batches: Any) -> None:
    """Save the losses of each plan's training with clipped AdamW, synchronous and then post-validated, by rank."""
    losses = []
    for path in plans:
        plan, make = Plan.load(path), partial(torch.optim.AdamW, lr=1e-2, fused=True)
        pipeline, ahead = (Pipeline(None, plan, optimizer=make) for _ in range(2))
        rows = [tokens.chunk(plan.options.data)[pipeline.ranks.replica] for tokens in batches]
        synchronous = [(float(pipeline.step(tokens)), pipeline.optimizer_step(0.5)) for tokens in rows]
        results = [ahead.post_validated_step(tokens, max_norm=0.5) for tokens in rows]
        ahead_losses = [r.loss for r in (*results, ahead.finish_update()) if r is not None]
        losses.append(([loss for loss, _ in synchronous], ahead_losses))
    torch.save(losses, folder / f"rank{rank}.pt")


def moved(rank: Any, folder: Any, plans: Any, batches: Any) -> None:
    """Save losses and full parameters of runs that each take one step by each of some plans, by rank."""
    answers = []
    for paths in plans:
        made = [Plan.load(path) for path in paths]
        pipeline = Pipeline(None, made[0], optimizer=partial(torch.optim.AdamW, lr=1e-2))
        losses = []
        for plan, tokens in zip(made, batches, strict=True):
            pipeline.switch_plan(plan)
            losses.append(float(pipeline.step(tokens)))
            pipeline.optimizer_step(0.5)
        answers.append((losses, {name: p.clone() for name, p in pipeline.state_dict().items()}))
    torch.save(answers, folder / f"rank{rank}.pt")
