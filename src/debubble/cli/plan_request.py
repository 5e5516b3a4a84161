"""Requests of `debubble plan`: a plan of a model on a cluster, or of costs from files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from debubble.cli import options as o
from debubble.cli.output import SearchProgress
from debubble.cli.plan_options import CostInputs, PlanOptions
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
    """A request for a plan of a model on a cluster."""

    model: Model
    cluster: Cluster
    run: o.ModelRun
    options: PlanOptions
    inputs: CostInputs
    search: o.SearchLimits
    stream: bool

    def plan(self, status: Status) -> Plan:
        """Search the fastest plan for the target, with progress in the status.  Raises a DebubbleError without one."""
        return self.plan_for(self.options.target, status)

    def plan_for(self, target: str | None, status: Status, *, subject: str | None = None) -> Plan:
        """Search the fastest plan that a framework runs; None: any framework."""
        from debubble.planners.plan_model import plan

        progress = SearchProgress(status, subject=subject, stream=self.stream)
        return plan(self.model, self.cluster, **{**self.arguments, "target": target}, progress=progress)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `plan` after the model and the cluster."""
        options = self.options
        return {
            "global_batch": options.global_batch, "micro_batches": options.micro_batches, "planner": options.planner,
            "chunks": options.chunks, "memory_limit": options.memory_limit, "profile": self.inputs.profile,
            "target": options.target, "swap": options.destination, "robust": options.robust, "compare": options.compare,
            "fastest": options.fastest, "lengths": options.lengths,
            **asdict(self.search), **self.run.degrees, **self.run.settings,
        }  # fmt: skip

    @property
    def job(self) -> Job:
        """The job of this request, with fixed or searched degrees."""
        from debubble.planners.degrees.space import Job
        from debubble.planners.plan_model import MICRO_BATCHES, for_target

        run, options = self.run, self.options
        run_options = for_target(run.run_options, options.target)
        limit = options.memory_limit
        cluster = self.cluster if limit is None else self.cluster.with_limit(limit)
        if options.global_batch is not None:
            batch, fixed = options.global_batch, run.degrees
        else:
            number = MICRO_BATCHES if options.micro_batches is None else options.micro_batches
            batch = run_options.data * run_options.micro_batch_size * number
            degrees = {name: getattr(run_options, name) for name in o.DEGREES if name != "pipeline"}
            fixed = {**degrees, "micro_batches": number}
        return Job(
            model=self.model, cluster=cluster, global_batch=batch, options=run_options, fixed=fixed,
            target=options.target, effort=self.search.effort, deadline=self.search.deadline, swap=options.destination,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CostsRequest:
    """A request for a plan of stage costs or model units from files, in the files' units."""

    run: o.ModelRun
    options: PlanOptions
    inputs: CostInputs
    search: o.SearchLimits
    stream: bool

    def plan(self, status: Status) -> Plan:
        """Search the fastest plan."""
        from debubble.planners.plan_model import solve
        from debubble.planners.progress import progress_listener

        problem, run_options = self._problem, RunOptions(post_validation=self.run.post_validation)
        with progress_listener(SearchProgress(status, seconds=problem.measured, stream=self.stream)):
            return solve(problem, planner=self.options.planner, options=run_options)

    @property
    def _problem(self) -> Problem:
        from debubble.costs import load_costs, load_units, parse_size
        from debubble.planners import FixedStages, ModelUnits, Problem
        from debubble.planners.plan_model import MICRO_BATCHES

        options, devices = self.options, o.required_devices(self.inputs.devices)
        workload: FixedStages | ModelUnits
        if self.inputs.units is not None:
            units, text = load_units(self.inputs.units), options.memory_limit
            # A file with seconds has bytes, too.
            limit = parse_size(text) if units.seconds and text is not None else o.abstract_limit(text)
            workload = ModelUnits(units if limit is None else replace(units, memory_limit=(limit,)))
        else:
            assert self.inputs.costs is not None
            limit = o.abstract_limit(options.memory_limit)
            file = self.inputs.costs
            _check_stages(file, load_costs(file).stages, devices=devices, chunks=options.chunks)
            costs = load_costs(file, stages=devices * (options.chunks or 1))
            workload = FixedStages(costs if limit is None else costs.with_limit(limit))
        sliced = workload.units if isinstance(workload, ModelUnits) else workload.costs
        count = MICRO_BATCHES if options.micro_batches is None else options.micro_batches
        problem = Problem(
            workload=workload, devices=devices, chunks=options.chunks,
            micro_batches=count * sliced.slices,
            objective="span" if self.run.post_validation else "makespan", **asdict(self.search),
        )  # fmt: skip
        return replace(problem.swapping(options.destination), robust=options.robust, compare=options.compare)


def _check_stages(file: Path, stages: int, *, devices: int, chunks: int | None) -> None:
    """Raise InputError if devices and chunks do not have a costs file's number of stages, where 1 fits any number."""
    if stages in (1, devices * (chunks or 1)):
        return
    how = f"--chunks {stages // devices}" if stages % devices == 0 else f"--devices that divide {stages}"
    current = f"--devices {devices}" + ("" if chunks is None else f" --chunks {chunks}")
    raise InputError(
        f"{file} has the costs of {stages} stages, and {current} makes {devices * (chunks or 1)}: give {how}."
    )


Request = ModelRequest | CostsRequest
"""A request for a plan of a model or of costs."""
