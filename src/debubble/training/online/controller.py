"""Controller of online scheduling: decides which plan a run continues with.

It works in windows of steps.  At the end of a window it rolls back the last switch if steps have become slower, starts
a new search if the measured costs have drifted, and adopts the search's best plan, on trial for one window, if that is
predicted to be faster.  Rank 0 decides between two steps, and all ranks switch to its plan.  Needs no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from debubble.errors import readable
from debubble.files import decode_json
from debubble.ir import InputError, StageCosts
from debubble.ir.trace import TraceStep
from debubble.plans import Plan
from debubble.plans.plan_file import PlanFile
from debubble.runtime.pipeline import Pipeline
from debubble.training.online.journal import Journal, JournalEntry
from debubble.training.online.measurement import (
    SwitchEffect,
    drift,
    effect,
    measured_costs,
    memory_excess,
    with_excess,
)
from debubble.training.online.partition import move_seconds
from debubble.training.online.scheduler import BetterOrder
from debubble.training.online.search_process import SearchProcess, leave_core, spare_core
from debubble.training.online.unit_costs import measured_profile


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Thresholds for measuring, searching and switching."""

    settling: int = 2
    """Steps after the start and after a switch that are not measured."""
    window: int = 8
    """Steps per measurement window."""
    min_gain: float = 0.02
    """Minimum predicted relative gain of a switch."""
    drift: float = 0.2
    """Relative change of a stage's times that starts a new search; two consecutive windows must agree on it."""
    memory_excess: float = 0.01
    """Fraction of a device's memory limit by which a measured peak must exceed the prediction to start a search."""
    effort: float = 300.0
    """Effort of a search, in seconds of the reference machine; OptPipe's for up to 8 devices."""


@dataclass(frozen=True)
class SwitchTrial:
    """A switch whose effect is being measured."""

    before: Plan
    predicted: SwitchEffect
    seconds: list[float]
    """Seconds of each step before it."""
    costs: StageCosts | None
    """Costs that the search assumed before the switch."""


class Controller:
    """Decides after every step whether to continue with another plan.

    Args:
        plan: The running plan.
        search: Starts a search for a plan with measured costs and a number of remaining steps, over which moving units
            must amortize; 0: units stay in their stages.
        journal: The log of searches and switches.
        policy: Thresholds.
        steps: Total steps of the run, over which moving units must amortize; None: units stay in their stages.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        search: Callable[[Plan, int], SearchProcess],
        journal: Journal,
        policy: Policy | None = None,
        steps: int | None = None,
    ) -> None:
        self.plan = plan
        """The running plan."""
        self.journal = journal
        self._start_search, self._policy, self._steps_of_run = search, policy or Policy(), steps
        self._settling = self._policy.settling
        self._seconds: list[float] = []
        self._steps: list[TraceStep] = []
        self._costs: StageCosts | None = None
        """Costs that the search assumes; None before the first search."""
        self._before: StageCosts | None = None
        """Costs measured in the previous window."""
        self._search: SearchProcess | None = None
        self._best: BetterOrder | None = None
        """Newest result of the search."""
        self._predicted: float | None = None
        """Predicted seconds per step of the running plan; None while the search's initial plan runs."""
        self._best_rejected = math.inf
        """Predicted seconds per step of the fastest plan that was rolled back; only faster plans are tried."""
        self._trial: SwitchTrial | None = None

    def after_step(self, step: int, seconds: float, traced: TraceStep) -> Plan | None:
        """Record a step, and return the plan to switch to, if any, after `step` steps."""
        if self._settling:
            self._settling -= 1
            return None
        self._seconds.append(seconds)
        self._steps.append(traced)
        if len(self._seconds) < self._policy.window:
            return None
        chosen = self._decide(step)
        self._seconds, self._steps = [], []
        if chosen is not None:
            self.plan, self._settling = chosen, self._policy.settling
            self.journal.runs(chosen)
        return chosen

    def close(self) -> None:
        """End the search."""
        if self._search is not None:
            self._search.close()
            self._search = None

    def _decide(self, step: int) -> Plan | None:
        """Decide at the end of a window: return the plan to switch to, None to continue as before."""
        if self._trial is not None:
            trial, self._trial = self._trial, None
            measured = effect(trial.seconds, self._seconds)
            lost = measured.after - measured.before
            comparable = measured.worse and math.isfinite(trial.predicted.before)
            if comparable and self._worth_moving(step, trial.before, lost):
                self._best_rejected, self._predicted = trial.predicted.after, trial.predicted.before
                self._costs = trial.costs
                self._log_switch(step, "taken back", trial.before, predicted=trial.predicted, measured=measured)
                return trial.before
            self._log_switch(step, "kept", self.plan, predicted=trial.predicted, measured=measured)
        self._search_if_drifted(step)
        return self._adopt_if_better(step)

    def _search_if_drifted(self, step: int) -> None:
        assumed = self._costs or self.plan.costs
        costs = measured_costs(self.plan.schedule, assumed, self._steps)
        excess = memory_excess(self.plan.schedule, assumed, self._steps)
        before, self._before = self._before, costs
        change, limit = drift(assumed, costs), self._policy.drift
        steady = change <= limit or before is None or drift(before, costs) > limit
        if self._costs is not None and steady and not self._exceeds(excess):
            return
        costs = with_excess(costs, excess)
        self.close()
        self._costs = costs
        self._best, self._predicted, self._best_rejected = None, None, math.inf
        reason = None
        if self._exceeds(excess):
            reason = f"device {excess.index(max(excess))} holds {readable(max(excess))} more than predicted"
        self.journal.note(JournalEntry(step=step, event="search", drift=change, reason=reason))
        try:
            measured = replace(self.plan, costs=costs, profile=self._profile(costs))
            self._search = self._start_search(measured, self._steps_left(step))
        except (OSError, InputError) as error:  # such as no memory for a process, or no disk space for its files
            self.journal.note(JournalEntry(step=step, event="search failed", reason=str(error)))

    def _profile(self, costs: StageCosts) -> Mapping[str, Any] | None:
        """The profile of the measured units; None if they cannot be priced: then only orders are searched."""
        try:
            return measured_profile(self.plan, costs, self._steps)
        except InputError:
            return None

    def _exceeds(self, excess: Sequence[float]) -> bool:
        """Tell whether a device's peak exceeds the prediction by more than the policy allows."""
        limits = [self.plan.costs.limit_of(device) for device in range(self.plan.devices)]
        share = self._policy.memory_excess
        return any(limit is not None and more > share * limit for more, limit in zip(excess, limits, strict=True))

    def _adopt_if_better(self, step: int) -> Plan | None:
        if self._search is None:
            return None
        if reason := self._search.failure():
            self.journal.note(JournalEntry(step=step, event="search failed", reason=reason))
            self.close()
            return None
        self._best = self._search.newest() or self._best
        if self._best is None:
            return None
        after = self._best.makespan
        predicted = SwitchEffect(before=self._predicted or self._best.makespan_before, after=after, noise=0.0)
        if after > (1 - self._policy.min_gain) * min(predicted.before, self._best_rejected):
            return None
        if not self._worth_moving(step, self._best.plan, predicted.before - after):
            return None
        self._trial = SwitchTrial(self.plan, predicted, self._seconds, self._costs)
        # Its recomputation changes the costs; the times are those that the search was given.
        self._costs = self._best.plan.costs
        self._predicted = after
        self._log_switch(step, "adopted", self._best.plan, predicted=predicted)
        return self._best.plan

    def _steps_left(self, step: int) -> int:
        """Remaining steps over which moving units must amortize."""
        return 0 if self._steps_of_run is None else self._steps_of_run - step

    def _worth_moving(self, step: int, plan: Plan, saved: float) -> bool:
        """Tell whether saving `saved` seconds per remaining step exceeds the time of moving units to the plan."""
        same = plan.lengths == self.plan.lengths
        return same or saved * self._steps_left(step) > move_seconds(self.plan, plan)

    def _log_switch(
        self, step: int, event: str, running: Plan, *, predicted: SwitchEffect, measured: SwitchEffect | None = None
    ) -> None:
        moved = running.lengths != self.plan.lengths
        entry = JournalEntry(
            step=step, event=event, schedule=running.schedule.name, predicted=predicted, measured=measured,
            units=running.lengths if moved else None,
        )  # fmt: skip
        self.journal.note(entry)


class OnlineScheduler:
    """Switches a pipeline to better plans of its model and devices while it trains.

    `controller` decides on rank 0; the others have None.
    """

    def __init__(self, pipeline: Pipeline, controller: Controller | None) -> None:
        self._pipeline, self._controller = pipeline, controller

    @staticmethod
    def start(pipeline: Pipeline, journal: Journal, *, steps: int | None = None) -> OnlineScheduler:
        """Create the scheduler; its searches run in a separate process on rank 0's machine.  All ranks call it.

        Args:
            pipeline: The pipeline that trains.
            journal: The log of searches and switches, written by rank 0.
            steps: Total steps of the run, over which moving units must amortize; None: units stay in their stages.
        """
        pipeline.measured.unit_times.enabled = True
        rank, ranks_here = pipeline.ranks.transport.rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        core = spare_core(ranks_here)
        if core is not None and rank < ranks_here:
            leave_core(core)
        if rank:
            return OnlineScheduler(pipeline, None)
        search = partial(SearchProcess, effort=Policy().effort, core=core)
        return OnlineScheduler(
            pipeline,
            Controller(
                pipeline.plan, search=search, journal=journal, steps=steps if pipeline.moves_units else None
            ),
        )  # fmt: skip

    def close(self) -> None:
        """End the search."""
        if self._controller is not None:
            self._controller.close()

    @property
    def entries(self) -> Sequence[JournalEntry]:
        """Searches and switches so far, on rank 0."""
        return () if self._controller is None else self._controller.journal.entries

    def after_step(self, step: int, seconds: float, traced: TraceStep) -> Plan | None:
        """Let rank 0 decide after `step` steps, and return the plan that all ranks have switched to, if any.

        All ranks call it between two steps (see `Pipeline.switch_plan`).
        """
        chosen = None if self._controller is None else self._controller.after_step(step, seconds, traced)
        plan_bytes = self._pipeline.ranks.transport.gather(
            None if chosen is None else msgspec.json.encode(chosen.to_file())
        )[0]
        if plan_bytes is None:
            return None
        plan = Plan.of_file(decode_json(plan_bytes, PlanFile))
        self._pipeline.switch_plan(plan)
        return plan
