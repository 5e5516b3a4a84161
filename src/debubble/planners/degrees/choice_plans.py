"""Thorough plan of one choice of degrees, the fastest of several planners, and the summary of a plan for tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from debubble.costs.flops import Utilization
from debubble.ir import CutOffError, DebubbleError
from debubble.ir.degrees import QUICK_PLAN, ConfigurationSummary, Degrees
from debubble.planners.auto import planners_for
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.memory import parts_at_peak
from debubble.planners.degrees.ranking import NEGLIGIBLE_DIFFERENCE
from debubble.planners.degrees.simplest import PlannedChoice
from debubble.planners.degrees.space import Job
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.registry import Result, planners, verify
from debubble.search.effort import Deadline

LARGE_JOB_PAIRS = 1024
"""From this many (pipeline device, micro-batch) pairs on, only `PLANNERS_OF_LARGE_JOBS` run: others take too long."""
PLANNERS_OF_LARGE_JOBS = ("adapipe", "portfolio")
"""Planners that are fast enough for large jobs."""
MIN_SECONDS_LEFT = 1e-3
"""Least deadline, in seconds, of a planner that starts after the job's deadline because nothing fits yet."""


def thorough(problem: Problem, *, names: Sequence[str] = ("adapipe",)) -> Solution:
    """Return the fastest of the quick plan and the plans of these planners, which run sequentially in this process."""
    answers: list[Result] = []
    reasons: list[DebubbleError] = []
    if problem.slices > 1:
        names = planners_for(problem)
    clock = Deadline(math.inf if problem.deadline is None else problem.deadline)
    for name in (QUICK_PLAN, *names):
        if answers and clock.passed:
            break
        try:
            if name == QUICK_PLAN:
                answers.append(verify(name, problem, quick_step(problem)[1], 0.0))
            else:
                seconds = None if problem.deadline is None else max(clock.remaining, MIN_SECONDS_LEFT)
                answers.append(planners[name](replace(problem, deadline=seconds)))
                if answers[-1].solution.interrupted:
                    break
        except DebubbleError as reason:
            reasons.append(reason)
    if not answers:
        raise next((reason for reason in reasons if isinstance(reason, CutOffError)), closest(reasons))
    fastest = min(answer.time for answer in answers)
    best = next(answer for answer in answers if answer.time <= fastest * (1 + NEGLIGIBLE_DIFFERENCE))
    interrupted = answers[-1].solution.interrupted
    return replace(
        best.solution, lower_bound=best.pipeline_bound, remark=None, candidates=(best.summary,), interrupted=interrupted
    )


def summary_of(job: Job, degrees: Degrees, problem: Problem, result: Result) -> ConfigurationSummary:
    """The summary of a choice of degrees: step, throughput and memory of its plan."""
    schedule, costs, partition = result.solution.schedule, result.solution.costs, result.solution.partition
    assert partition is not None
    parts = parts_at_peak(problem.units, partition, schedule, costs, result.timeline.peak_memory)
    fullest = max(parts, key=lambda device: device.total)
    step = float(result.time)
    tokens_per_second = job.tokens / step
    plan = PlannedChoice(degrees=degrees, solution=result.solution, step=step)
    return ConfigurationSummary(
        degrees=replace(degrees, chunks=schedule.placement.chunks),
        step_time=step,
        tokens_per_second_per_device=tokens_per_second / degrees.devices,
        mfu=Utilization.of_run(job.model, job.cluster, job.run_options(degrees), devices=degrees.devices).mfu(
            tokens_per_second
        ),
        peak_memory=fullest.total,
        memory=fullest,
        planner=result.planner,
        schedule=schedule.name,
        levers=plan.levers,
    )
