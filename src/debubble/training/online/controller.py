"""Decides by which plan a run continues: from what was measured, and what a search has found.

It works in windows of steps.  At the end of each, what was measured may show that the last switch made steps slower:
then it is rolled back.  Or that costs have drifted: then a new search begins.  Or the search may have found an order
that is predicted to be faster: then it is adopted, on trial for a window.  Rank 0 decides between two steps, and all
ranks continue by its plan.  Needs no torch.
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
    """Settings of when to measure, search and switch."""

    settling: int = 2
    """Steps after a switch, and at the start, that say nothing yet."""
    window: int = 8
    """Steps that are measured together."""
    least_gain: float = 0.02
    """Predicted share of a step for which a switch is worth its trouble."""
    drift: float = 0.2
    """Relative change of a stage's times after which a new search begins; two windows in a row must agree on it."""
    memory: float = 0.01
    """Share of a device's memory limit by which a measured peak may exceed the predicted one before a search begins."""
    effort: float = 300.0
    """Effort of a search, in seconds of the reference machine; the paper's for up to 8 devices."""


@dataclass(frozen=True)
class SwitchTrial:
    """A switch whose effect is being measured."""

    before: Plan
    predicted: SwitchEffect
    seconds: list[float]
    """Seconds of each step before it."""
    costs: StageCosts | None
    """Costs that the search assumed before it."""


class Controller:
    """Decides after every step whether to continue with another plan.

    Args:
        plan: What runs.
        search: Begins a search for better orders of a plan, with the measured costs in it, and in so many steps that
            are left for better partitions; with 0 units stay in their stages.
        journal: What happens is noted there.
        policy: Settings.
        steps: Steps of the run, in which moving units must pay; None: units stay in their stages.
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
        """The plan that runs."""
        self.journal = journal
        self._begin, self._policy, self._steps_of_run = search, policy or Policy(), steps
        self._settling = self._policy.settling
        self._seconds: list[float] = []
        self._steps: list[TraceStep] = []
        self._costs: StageCosts | None = None
        """Costs that the search assumes; None before the first search."""
        self._before: StageCosts | None = None
        """Costs that the window before this one measured."""
        self._search: SearchProcess | None = None
        self._found: BetterOrder | None = None
        """Newest answer of the search."""
        self._predicted: float | None = None
        """Seconds per step of what runs, as the search sees it; None while what runs is what it started from."""
        self._best_rejected = math.inf
        """Seconds per step predicted for the fastest plan that was rolled back: only faster ones are tried."""
        self._trial: SwitchTrial | None = None

    def after_step(self, step: int, seconds: float, traced: TraceStep) -> Plan | None:
        """The plan to continue with, if it is another one, now that `step` steps are done."""
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
            if measured.worse and math.isfinite(trial.predicted.before) and self._pays(step, trial.before, lost):
                self._best_rejected, self._predicted = trial.predicted.after, trial.predicted.before
                self._costs = trial.costs
                self._note(step, "taken back", trial.before, predicted=trial.predicted, measured=measured)
                return trial.before
            self._note(step, "kept", self.plan, predicted=trial.predicted, measured=measured)
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
        self._found, self._predicted, self._best_rejected = None, None, math.inf
        most = max(excess)
        why = (
            f"device {excess.index(most)} holds {readable(most)} more than predicted" if self._exceeds(excess) else None
        )
        self.journal.note(JournalEntry(step=step, event="search", drift=change, reason=why))
        try:
            measured = replace(self.plan, costs=costs, profile=self._profile(costs))
            self._search = self._begin(measured, self._steps_left(step))
        except (OSError, InputError) as error:  # no room for another process or its files
            self.journal.note(JournalEntry(step=step, event="search failed", reason=str(error)))

    def _profile(self, costs: StageCosts) -> Mapping[str, Any] | None:
        """The units as they were measured; None where they cannot be priced, so that orders alone are searched."""
        try:
            return measured_profile(self.plan, costs, self._steps)
        except InputError:
            return None

    def _exceeds(self, excess: Sequence[float]) -> bool:
        """Tell whether a device has so much more memory in use than predicted that another plan may be needed."""
        limits = [self.plan.costs.limit_of(device) for device in range(self.plan.devices)]
        share = self._policy.memory
        return any(limit is not None and more > share * limit for more, limit in zip(excess, limits, strict=True))

    def _adopt_if_better(self, step: int) -> Plan | None:
        if self._search is None:
            return None
        if reason := self._search.failure():
            self.journal.note(JournalEntry(step=step, event="search failed", reason=reason))
            self.close()
            return None
        self._found = self._search.newest() or self._found
        if self._found is None:
            return None
        after = self._found.makespan
        predicted = SwitchEffect(before=self._predicted or self._found.makespan_before, after=after, noise=0.0)
        if after > (1 - self._policy.least_gain) * min(predicted.before, self._best_rejected):
            return None
        if not self._pays(step, self._found.plan, predicted.before - after):
            return None
        self._trial = SwitchTrial(self.plan, predicted, self._seconds, self._costs)
        # What it recomputes has other costs; their times are those that the search was given.
        self._costs = self._found.plan.costs
        self._predicted = after
        self._note(step, "adopted", self._found.plan, predicted=predicted)
        return self._found.plan

    def _steps_left(self, step: int) -> int:
        """Steps in which moving units has to pay."""
        return 0 if self._steps_of_run is None else self._steps_of_run - step

    def _pays(self, step: int, plan: Plan, saved: float) -> bool:
        """Tell whether the seconds that the steps which are left save take longer than moving the plan's units."""
        same = plan.lengths == self.plan.lengths
        return same or saved * self._steps_left(step) > move_seconds(self.plan, plan)

    def _note(
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
        """Start with a search in a process of its own on rank 0's machine.  All ranks call it.

        Args:
            pipeline: What trains.
            journal: Rank 0 notes there what happens.
            steps: Steps of the run, in which moving units between devices must pay; None: units stay.
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
        """The plan that all ranks have switched to, if they have, now that `step` steps are done.

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
