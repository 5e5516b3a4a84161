"""A cache of this machine's best plans by question, which repeated searches improve.

A question consists of the model, the cluster, the seed and all other arguments of a plan except effort and deadline,
for one version of debubble.  When it is asked again, it is searched with the next seed, and the faster plan is the
answer.  As answers depend on earlier questions, the cache is opt-in (`debubble plan --cache`).
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
    """The cached answer to a question, and how often it was asked.

    Attributes:
        name: Stem of its file names; empty if nothing is cached.
        times: How often it was asked.
        best: The fastest plan so far; None if it was not asked before.
    """

    name: str = ""
    times: int = 0
    best: Plan | None = None

    @staticmethod
    def look_up(entries: Mapping[str, Any]) -> CachedAnswer:
        """Look up the question with these JSON entries."""
        question = json.dumps({**entries, "version": __version__}, sort_keys=True, default=str)
        name = hashlib.sha256(question.encode()).hexdigest()[:24]
        for path in sorted(_folder().glob(f"{name}-*.json"), reverse=True):
            # Damaged files, and files of another version, are ignored.
            with suppress(DebubbleError, ValueError):
                return CachedAnswer(name, int(path.stem.rpartition("-")[2]), Plan.load(path))
        return CachedAnswer(name)

    def answer(self, find: Callable[[], Plan], progress: Listener | None) -> Plan:
        """Return and cache the faster of the cached plan and the one that `find` makes.

        If the search is interrupted or finds nothing in time, the cached plan is returned.  `progress` is called with
        the cached plan and with the search's progress.
        """
        try:
            with progress_listener(progress):
                if self.best is not None:
                    _tell(self.best)
                plan = find()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            first, *rest = self.best.candidates
            return replace(self.best, candidates=(replace(first, interrupted=True), *rest))
        except CutOffError:
            if self.best is None:
                raise
            return self.best
        if self.best is not None and seconds_per_step(self.best) <= seconds_per_step(plan):
            plan = self.best
        if self.name:
            self._save(plan)
        return plan

    def _save(self, plan: Plan) -> None:
        with suppress(OSError, DebubbleError):  # a cache that cannot be written is no reason to fail
            _folder().mkdir(parents=True, exist_ok=True)
            plan.save(self._path(self.times + 1))
            if self.times:
                self._path(self.times).unlink(missing_ok=True)

    def _path(self, times: int) -> Path:
        return _folder() / f"{self.name}-{times:06d}.json"


def _folder() -> Path:
    return user_cache("answers")


def _tell(plan: Plan) -> None:
    seconds, planner = seconds_per_step(plan), plan.candidates[0].planner
    tell(Improvement(planner=planner, schedule=plan.schedule.name, step_time=seconds, gap=plan.gap_at(seconds)))
