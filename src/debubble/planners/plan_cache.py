"""The plans that this machine has found, by question: asked again, the answer is there at once and only gets better.

A question is the model, the cluster, the first seed and all arguments that say what is planned, asked of one version of
debubble; effort and deadline say how long to look.  Asked again, it is searched with the next seed, and the faster plan
is the answer.  So the answer depends on what was asked before, and the cache is used only where that is asked for
(`debubble plan --cache`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from debubble import __version__
from debubble.errors import DebubbleError
from debubble.files import user_cache
from debubble.ir import CutOffError
from debubble.planners.plan_step import seconds_per_step
from debubble.planners.progress import Improvement, Listener, progress_listener, tell
from debubble.plans import Plan


@dataclass(frozen=True)
class CachedAnswer:
    """The known answer to a question, and how often it was asked.

    Attributes:
        name: The name of its files; empty if nothing is kept.
        times: How often it was asked.
        best: The fastest plan that was found; None if it was not asked before.
    """

    name: str = ""
    times: int = 0
    best: Plan | None = None

    @staticmethod
    def of(entries: Mapping[str, Any]) -> CachedAnswer:
        """Look up the question that these entries make, which are JSON."""
        question = json.dumps({**entries, "version": __version__}, sort_keys=True, default=str)
        name = hashlib.sha256(question.encode()).hexdigest()[:24]
        for place in sorted(_folder().glob(f"{name}-*.json"), reverse=True):
            # A damaged file, or one of another version, is no answer.
            with suppress(DebubbleError, ValueError):
                return CachedAnswer(name, int(place.stem.rpartition("-")[2]), Plan.load(place))
        return CachedAnswer(name)

    def answer(self, find: Callable[[], Plan], progress: Listener | None) -> Plan:
        """The faster of the known plan and of the one that is found now, which the cache then has.

        An interrupted search, or one that finds nothing in time, leaves the known plan.  `progress` is told what is
        found.
        """
        try:
            with progress_listener(progress):
                if self.best is not None:
                    _tell(self.best)
                found = find()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            first, *others = self.best.candidates
            return replace(self.best, candidates=(replace(first, interrupted=True), *others))
        except CutOffError:
            if self.best is None:
                raise
            return self.best
        if self.best is not None and seconds_per_step(self.best) <= seconds_per_step(found):
            found = self.best
        if self.name:
            self._keep(found)
        return found

    def _keep(self, plan: Plan) -> None:
        with suppress(OSError, DebubbleError):  # a cache that cannot be written is no reason to fail
            _folder().mkdir(parents=True, exist_ok=True)
            plan.save(self._place(self.times + 1))
            if self.times:
                self._place(self.times).unlink(missing_ok=True)

    def _place(self, times: int) -> Path:
        return _folder() / f"{self.name}-{times:06d}.json"


def _folder() -> Path:
    return user_cache("answers")


def _tell(plan: Plan) -> None:
    seconds = seconds_per_step(plan)
    planner = plan.candidates[0].planner
    tell(
        Improvement(
            planner=planner, schedule=plan.schedule.name, step_time=seconds, gap=plan.gap_at(seconds)
        )
    )  # fmt: skip
