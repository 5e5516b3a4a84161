"""The usual choices of degrees, FSDP and data parallelism, and frameworks in which they fit if debubble's do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from debubble.ir import DebubbleError
from debubble.ir.degrees import QUICK_PLAN, Degrees, UsualChoice
from debubble.planners.degrees.choice_plans import summary_of
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.space import Job
from debubble.planners.problem import Problem
from debubble.planners.registry import Result, verify

USUAL_CHOICES = {3: "FSDP (ZeRO-3)", 1: "data parallel (ZeRO-1)", 0: "one device"}
"""ZeRO levels of the usual choices -> their names."""
LAYERWISE_FSDP = "torchtitan"
"""The framework whose FSDP is tried; it gathers one layer at a time, debubble's runtime two stages."""
CPU_OPTIMIZER_FRAMEWORKS = ("deepspeed", "megatron")
"""Frameworks whose CPU optimizers are tried in this order if the job names none."""


def usual_choices(legal: Sequence[Degrees]) -> dict[str, list[Degrees]]:
    """The legal choices without model parallelism, by the name of their ZeRO level, smallest micro-batches first."""
    plain = [d for d in legal if d.devices == d.data and d.expert == d.slices == 1 and d.expert_tensor is None]
    plain.sort(key=lambda degrees: degrees.micro_batch_size)
    by_name = {name: [d for d in plain if d.zero == zero] for zero, name in USUAL_CHOICES.items()}
    return {name: choices for name, choices in by_name.items() if choices}


def usual_elsewhere(job: Job, name: str, choices: Sequence[Degrees]) -> UsualChoice | None:
    """A usual choice in a framework, or with a CPU optimizer, with which it fits; None if there is none.

    Args:
        job: The job.
        name: The choice's name.
        choices: Its degrees, smallest micro-batches first.
    """
    for change, changed in _changes(job):
        plan = _fastest(changed, choices)
        if plan is not None:
            return UsualChoice(name=f"{name}, {change}", configuration=summary_of(changed, *plan))
    return None


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Options of `plan` for other frameworks and CPU optimizers, with the job that they make."""
    offloaded = job.with_cpu_optimizer()
    if job.target is None:
        yield f"--for {LAYERWISE_FSDP}", job.for_target(LAYERWISE_FSDP)
        if offloaded is not None:
            yield "--host-optimizer 1", offloaded
    yield from with_cpu_optimizers(job)


def with_cpu_optimizers(job: Job) -> Iterator[tuple[str, Job]]:
    """Options of `plan` for a CPU optimizer in the job's framework, or in others if it names none, with the job."""
    offloaded = job.with_cpu_optimizer()
    if offloaded is None:
        return
    if job.target is not None:
        yield "--host-optimizer 1", offloaded
        return
    yield from ((f"--for {name} --host-optimizer 1", offloaded.for_target(name)) for name in CPU_OPTIMIZER_FRAMEWORKS)


def _fastest(job: Job, choices: Sequence[Degrees]) -> tuple[Degrees, Problem, Result] | None:
    """The fastest quick plan that runs; micro-batch sizes are tried in order until the step gets no shorter."""
    best: tuple[Degrees, Problem, Result] | None = None
    with suppress(DebubbleError):
        for degrees in choices:
            if not job.runs_as_planned(degrees):
                return best
            problem = job.problem(degrees)
            step, solution = quick_step(problem)
            if best is not None and step >= best[2].time:
                return best
            best = degrees, problem, verify(QUICK_PLAN, problem, solution, 0.0)
    return best
