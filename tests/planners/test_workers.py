import subprocess
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import cast

import pytest

from debubble.errors import PlannerFailedError
from debubble.ir import StageCosts
from debubble.planners import FixedStages, Problem
from debubble.planners.problem import Solution
from debubble.planners.process_pool import Task, TaskAnswer, ask_concurrently, by_completion
from debubble.processes import PYTHON
from tests.support.processes import children, wait_for_end

LONG_SEARCH = """
from debubble.ir import StageCosts
from debubble.planners import FixedStages, Problem
from debubble.planners.process_pool import ask_concurrently

costs = StageCosts.of(stages=8, memory_limit=3)
problem = Problem(devices=8, micro_batches=64, workload=FixedStages(costs), effort=1000)
with ask_concurrently({name: (name, problem) for name in ("optpipe", "joint")}) as answers:
    answers["joint"].result()
"""


def abandoned_search(problem: Problem) -> TaskAnswer:
    """The answer of a search whose caller left the context."""
    with ask_concurrently({name: (name, problem) for name in ("optpipe", "joint")}) as answers:
        return answers["optpipe"]


def test_searches_that_nobody_waits_for_are_ended() -> None:
    answer = abandoned_search(
        Problem(devices=8, micro_batches=64, workload=FixedStages(StageCosts.of(stages=8, memory_limit=3)), effort=120)
    )
    with pytest.raises((CancelledError, PlannerFailedError)):
        answer.result()


def test_tasks_after_one_that_fails_are_answered() -> None:
    fails = cast("Callable[[Problem], Solution]", len)
    problem = Problem(devices=2, micro_batches=2, workload=FixedStages(StageCosts.of(stages=2)))
    tasks: dict[str, Task] = {f"fails {i}": (fails, problem) for i in range(4)}
    completed = []
    with ask_concurrently(tasks | {"optpipe": ("optpipe", problem)}) as answers:
        for name in by_completion(answers):
            completed.append(name)
            if name == "optpipe":
                assert answers[name].result()[0].schedule.devices == 2
            else:
                with pytest.raises(PlannerFailedError, match=r"process_pool.py, line \d+: TypeError"):
                    answers[name].result()
    assert sorted(completed) == sorted([*tasks, "optpipe"])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are listed on Linux alone")
def test_a_search_ends_when_its_caller_is_killed() -> None:
    with subprocess.Popen([*PYTHON, "-c", LONG_SEARCH]) as caller:
        while not (searches := children(caller.pid)):
            assert caller.poll() is None
        caller.kill()
    wait_for_end(searches)
