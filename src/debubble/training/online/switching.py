"""Online scheduling as a run's ranks do it together: rank 0 decides between two steps, and all go on by its plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType

import msgspec

from debubble.ir import Plan
from debubble.ir.plan_file import PlanFile, decode, encode
from debubble.ir.trace import TraceStep
from debubble.runtime.pipeline import Pipeline
from debubble.training.online.controller import Controller, Policy
from debubble.training.online.cores import leave, spare_core
from debubble.training.online.journal import Entry, Journal
from debubble.training.online.search_process import Search


class Online(AbstractContextManager["Online"]):
    """Switches a pipeline to better orders of its plan's stages while it trains.

    `controller` decides on rank 0; the others have None.
    """

    def __init__(self, pipeline: Pipeline, controller: Controller | None) -> None:
        self._pipeline, self._controller = pipeline, controller

    @staticmethod
    def beside(pipeline: Pipeline, journal: Journal, *, policy: Policy | None = None) -> Online:
        """With a search in a process of its own on rank 0's machine.  All ranks call it."""
        policy = policy or Policy()
        rank, ranks_here = pipeline.ranks.transport.rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        core = spare_core(ranks_here)
        if core is not None and rank < ranks_here:
            leave(core)
        if rank:
            return Online(pipeline, None)
        search = partial(Search, effort=policy.effort, core=core)
        return Online(pipeline, Controller(pipeline.plan, search=search, journal=journal, policy=policy))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._controller is not None:
            self._controller.close()

    @property
    def entries(self) -> Sequence[Entry]:
        """What has happened so far, on rank 0."""
        return () if self._controller is None else self._controller.journal.entries

    def after_step(self, step: int, seconds: float, traced: TraceStep) -> Plan | None:
        """The plan that all ranks have switched to, if they have, now that `step` steps are done.

        All ranks call it between two steps.  Parameters, optimizers and everything else of the pipeline stay.
        """
        chosen = None if self._controller is None else self._controller.after_step(step, seconds, traced)
        told = self._pipeline.ranks.transport.gather(None if chosen is None else msgspec.json.encode(encode(chosen)))[0]
        if told is None:
            return None
        plan = decode(msgspec.json.decode(told, type=PlanFile))
        self._pipeline.follow(plan)
        return plan
