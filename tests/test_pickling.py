"""Data that is sent to other processes."""

from __future__ import annotations

import pickle

import debubble as db
from debubble.ir import RunOptions
from debubble.planners.model_problem import problem_of
from debubble.planners.problem import ModelUnits


def test_problem_is_pickled_without_cached_values() -> None:
    """A thread may be computing more meanwhile."""
    problem = problem_of(db.models["llama3.2-1b"], db.Cluster.parse("2xA100-80GB"), RunOptions(), micro_batches=4)
    before = pickle.dumps(problem)
    planned = db.planners["dapple"](problem)
    assert pickle.dumps(problem) == before
    unpickled = pickle.loads(before)
    assert isinstance(unpickled.workload, ModelUnits)
    assert db.planners["dapple"](unpickled).time == planned.time
