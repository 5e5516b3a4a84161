"""Planners that search, side by side in processes of their own.

Each worker is a fresh interpreter that reads a pickled (name, problem) and writes a pickled (Solution, seconds) or
error.  Nothing of the caller's process is inherited, so it does not matter whether it has threads, torch or no main
guard.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from debubble.ir import DebubbleError, InfeasibleError
from debubble.planners.problem import Problem, Solution

Answer = tuple[Solution, float]
"""What a planner found, and the seconds that it took."""

PATIENCE = 60.0
"""Seconds beyond its effort after which a worker is given up."""


@contextmanager
def searching(names: Sequence[str], problem: Problem) -> Iterator[dict[str, Future[Answer]]]:
    """Start a worker for each planner, as many at a time as there are cores; each future is its answer or error."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        futures = {name: pool.submit(_ask, name, problem) for name in names}
        try:
            yield futures
        finally:
            for future in futures.values():
                future.cancel()


def _ask(name: str, problem: Problem) -> Answer:
    """Run one worker to its end; raises the DebubbleError that it ended with."""
    try:
        worker = subprocess.run(
            [sys.executable, "-m", "debubble.planners.workers"],
            input=pickle.dumps((name, problem)),
            capture_output=True,
            timeout=problem.effort + PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InfeasibleError(f"It did not answer {PATIENCE:.0f} s after its time was up.") from None
    if worker.returncode:
        last = worker.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InfeasibleError(f"It failed: {' '.join(last)}")
    answer = pickle.loads(worker.stdout)
    if isinstance(answer, DebubbleError):
        raise answer
    solution, seconds = answer
    return solution, seconds


def _work() -> None:
    from debubble.planners.registry import planners

    name, problem = pickle.load(sys.stdin.buffer)
    answer: Answer | DebubbleError
    start = time.perf_counter()
    try:
        answer = planners[name].find(problem), time.perf_counter() - start
    except DebubbleError as error:
        # Errors with arguments of their own do not survive pickling; their sentence does.
        answer = InfeasibleError(str(error), missing=getattr(error, "missing", None))
    sys.stdout.buffer.write(pickle.dumps(answer))


if __name__ == "__main__":
    _work()
