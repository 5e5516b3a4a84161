"""The usual choices of degrees, FSDP and data parallelism, and how frameworks fit them where debubble does not."""

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
OF_UNITS = "torchtitan"
"""The framework whose FSDP is tried: it gathers a layer at a time, where debubble's runtime has two stages."""
OFFLOADING = ("deepspeed", "megatron")
"""The frameworks whose CPU optimizers are tried where the job names none, until one fits."""


def usual_choices(legal: Sequence[Degrees]) -> dict[str, list[Degrees]]:
    """The legal choices without any model parallelism, by the name of their ZeRO level, small micro-batches first."""
    plain = [d for d in legal if d.devices == d.data and d.expert == d.slices == 1 and d.expert_tensor is None]
    plain.sort(key=lambda degrees: degrees.micro_batch_size)
    found = {name: [d for d in plain if d.zero == zero] for zero, name in USUAL_CHOICES.items()}
    return {name: choices for name, choices in found.items() if choices}


def usual_elsewhere(job: Job, name: str, choices: Sequence[Degrees]) -> UsualChoice | None:
    """A usual choice that does not fit, as a framework fits it or with a CPU optimizer; None if nothing does.

    Args:
        job: The job.
        name: The choice's name.
        choices: Its degrees, small micro-batches first.
    """
    for change, there in _ways(job):
        found = _fastest(there, choices)
        if found is not None:
            return UsualChoice(name=f"{name}, {change}", configuration=summary_of(there, *found))
    return None


def _ways(job: Job) -> Iterator[tuple[str, Job]]:
    """Options of `plan`, and the job with them."""
    hosted = job.with_cpu_optimizer()
    if job.target is None:
        yield f"--for {OF_UNITS}", job.for_target(OF_UNITS)
        if hosted is not None:
            yield "--host-optimizer 1", hosted
    yield from with_cpu_optimizers(job)


def with_cpu_optimizers(job: Job) -> Iterator[tuple[str, Job]]:
    """Options of `plan` for a CPU optimizer of the job's framework, or of those that have one if it names none."""
    hosted = job.with_cpu_optimizer()
    if hosted is None:
        return
    if job.target is not None:
        yield "--host-optimizer 1", hosted
        return
    yield from ((f"--for {name} --host-optimizer 1", hosted.for_target(name)) for name in OFFLOADING)


def _fastest(job: Job, choices: Sequence[Degrees]) -> tuple[Degrees, Problem, Result] | None:
    """The fastest quick plan that runs; micro-batches become larger as long as they make the step shorter."""
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
