"""The request of `debubble plan`: the plan of a model on a cluster, or of costs that are given."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.cli import options as o
from debubble.cli.output import SearchProgress
from debubble.cli.plan_options import GivenCosts, Question
from debubble.ir import InputError, RunOptions
from debubble.plans import Plan

if TYPE_CHECKING:
    from rich.status import Status

    from debubble.costs import Cluster
    from debubble.models import Model
    from debubble.planners import Problem
    from debubble.planners.degrees.space import Job


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model on a cluster."""

    model: Model
    cluster: Cluster
    run: o.ModelRun
    asked: Question
    given: GivenCosts
    search: o.SearchLimits
    stream: bool

    def plan(self, status: Status) -> Plan:
        """The fastest plan that its target runs, with its progress in the status; a DebubbleError if there is none."""
        return self.plan_for(self.asked.target, status)

    def plan_for(self, target: str | None, status: Status, *, subject: str | None = None) -> Plan:
        """The fastest plan that this framework runs; None: debubble itself."""
        from debubble.planners.plan_model import plan

        told = SearchProgress(status, subject=subject, stream=self.stream)
        return plan(self.model, self.cluster, **{**self.arguments, "target": target}, progress=told)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `plan` besides the model and its cluster."""
        asked = self.asked
        return {
            "global_batch": asked.global_batch, "micro_batches": asked.micro_batches, "planner": asked.planner,
            "chunks": asked.chunks, "memory_limit": asked.memory_limit, "profile": self.given.profile,
            "target": asked.target, "swap": asked.destination, "robust": asked.robust, "compare": asked.compare,
            "fastest": asked.fastest, "lengths": asked.lengths,
            **asdict(self.search), **self.run.degrees, **self.run.settings,
        }  # fmt: skip

    @property
    def job(self) -> Job:
        """The job whose degrees were given, or are searched."""
        from debubble.planners.degrees.space import Job
        from debubble.planners.plan_model import MICRO_BATCHES, for_target

        run, asked = self.run, self.asked
        options = for_target(run.run_options, asked.target)
        limit = asked.memory_limit
        cluster = self.cluster if limit is None else self.cluster.with_limit(limit)
        if asked.global_batch is not None:
            batch, fixed = asked.global_batch, run.degrees
        else:
            number = MICRO_BATCHES if asked.micro_batches is None else asked.micro_batches
            batch = options.data * options.micro_batch_size * number
            degrees = {name: getattr(options, name) for name in o.DEGREES if name != "pipeline"}
            fixed = {**degrees, "micro_batches": number}
        return Job(
            model=self.model, cluster=cluster, global_batch=batch, options=options, fixed=fixed, target=asked.target,
            effort=self.search.effort, deadline=self.search.deadline, swap=asked.destination,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GivenRequest:
    """Stage costs or model units that are given, in units of their own."""

    run: o.ModelRun
    asked: Question
    given: GivenCosts
    search: o.SearchLimits
    stream: bool

    def plan(self, status: Status) -> Plan:
        """The fastest plan of them."""
        from debubble.planners.plan_model import solve
        from debubble.planners.progress import progress_listener

        options = RunOptions(post_validation=self.run.post_validation)
        problem = self._problem
        with progress_listener(SearchProgress(status, seconds=problem.measured, stream=self.stream)):
            return solve(problem, planner=self.asked.planner, options=options)

    @property
    def _problem(self) -> Problem:
        from debubble.costs import load_costs, load_units, parse_size
        from debubble.planners import FixedStages, ModelUnits, Problem
        from debubble.planners.plan_model import MICRO_BATCHES

        asked, devices = self.asked, o.required_devices(self.given.devices)
        workload: FixedStages | ModelUnits
        if self.given.units is not None:
            units, text = load_units(self.given.units), asked.memory_limit
            # Bytes of a file with seconds were measured.
            limit = parse_size(text) if units.seconds and text is not None else o.abstract_limit(text)
            workload = ModelUnits(units if limit is None else replace(units, memory_limit=(limit,)))
        else:
            assert self.given.costs is not None
            limit = o.abstract_limit(asked.memory_limit)
            _check_stages(self.given.costs, load_costs(self.given.costs).stages, devices=devices, chunks=asked.chunks)
            costs = load_costs(self.given.costs, stages=devices * (asked.chunks or 1))
            workload = FixedStages(costs if limit is None else costs.with_limit(limit))
        sliced = workload.units if isinstance(workload, ModelUnits) else workload.costs
        count = MICRO_BATCHES if asked.micro_batches is None else asked.micro_batches
        problem = Problem(
            workload=workload, devices=devices, chunks=asked.chunks,
            micro_batches=count * sliced.slices,
            objective="span" if self.run.post_validation else "makespan", **asdict(self.search),
        )  # fmt: skip
        return replace(problem.swapping(asked.destination), robust=asked.robust, compare=asked.compare)


def _check_stages(file: Path, stages: int, *, devices: int, chunks: int | None) -> None:
    """Refuse devices and chunks that do not have the stages of a costs file, and say which chunks have; 1 is any."""
    if stages in (1, devices * (chunks or 1)):
        return
    how = f"--chunks {stages // devices}" if stages % devices == 0 else f"--devices that divide {stages}"
    given = f"--devices {devices}" + ("" if chunks is None else f" --chunks {chunks}")
    raise InputError(
        f"{file} has the costs of {stages} stages, and {given} makes {devices * (chunks or 1)}: give {how}."
    )


Request = ModelRequest | GivenRequest
"""The model or the costs to plan for, and how."""
