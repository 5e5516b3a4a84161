"""Planners that search, side by side in processes of their own, where that is worth a process.

Each worker is a fresh interpreter that reads a pickled (planner, problem) and writes a pickled (Solution, seconds) or
error.  Nothing of the caller's process is inherited, so it does not matter whether it has threads, torch or no main
guard, which the processes of `concurrent.futures` would import again.  A worker ends when its parent is gone.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from typing import TypeVar

from debubble.ir import CutOffError, DebubbleError, InfeasibleError
from debubble.planners.problem import Problem, Solution
from debubble.processes import PYTHON

Answer = tuple[Solution, float]
"""A planner's solution, and the seconds that it took."""

Worker = subprocess.Popen[bytes]

PATIENCE = 60.0
"""Seconds beyond its deadline, and to start, after which a worker is given up."""


Task = tuple[str | Callable[[Problem], Solution], Problem]
"""A planner, by name or as a function at the top of a module, and what it is asked."""

Key = TypeVar("Key", bound=Hashable)

WORKER = 0.5
"""Effort of a search from which it is worth a worker, in seconds: to start one takes about as long."""


@contextmanager
def side_by_side(tasks: Mapping[Key, Task]) -> Iterator[dict[Key, Future[Answer]]]:
    """Start a worker for each task that is worth one, as many at a time as there are cores.

    Each future is the task's answer or error; what is not worth a worker is worked out here when it is asked for.
    Workers that still search at the end, as after a Ctrl-C, are ended.
    """
    running: set[Worker] = set()
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        workers = {key: pool.submit(_ask, task, running) for key, task in tasks.items() if _is_worth_a_worker(*task)}
        try:
            yield {key: workers[key] if key in workers else _LocalAnswer(task) for key, task in tasks.items()}
        finally:
            for future in workers.values():
                future.cancel()
            while wait(workers.values(), timeout=0.05).not_done:
                for worker in tuple(running):
                    worker.kill()


def by_completion(futures: Mapping[Key, Future[Answer]]) -> Iterator[Key]:
    """The keys as they are answered: those worked out here first, each when it is asked for."""
    yield from (key for key, future in futures.items() if isinstance(future, _LocalAnswer))
    key_of = {future: key for key, future in futures.items() if not isinstance(future, _LocalAnswer)}
    for future in as_completed(key_of):
        yield key_of[future]


def _is_worth_a_worker(asked: str | Callable[[Problem], Solution], problem: Problem) -> bool:
    from debubble.planners.registry import planners

    searches = planners[asked].searches if isinstance(asked, str) else True
    return searches and problem.effort >= WORKER


class _LocalAnswer(Future[Answer]):
    """A task's answer that is worked out here when it is asked for."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task

    def result(self, timeout: float | None = None) -> Answer:
        """Ask the planner."""
        return _answer(*self._task)


def _answer(asked: str | Callable[[Problem], Solution], problem: Problem) -> Answer:
    from debubble.planners.registry import planners

    find = planners[asked].find if isinstance(asked, str) else asked
    start = time.perf_counter()
    return find(problem), time.perf_counter() - start


def _ask(task: Task, running: set[Worker]) -> Answer:
    """Run one worker to its end, among those `running`; raises the DebubbleError that it ended with."""
    _, problem = task
    command, pipe = [*PYTHON, "-m", "debubble.planners.process_pool", str(os.getpid())], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as worker:
        running.add(worker)
        try:
            patience = problem.begun().brake.left + PATIENCE
            output, errors = worker.communicate(pickle.dumps(task), timeout=patience)
        except subprocess.TimeoutExpired:
            worker.kill()
            raise CutOffError(
                f"It had not answered {PATIENCE:.0f} s after its deadline; give it more time with --deadline."
            ) from None
        finally:
            running.discard(worker)
    if worker.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise InfeasibleError(f"It failed: {' '.join(last)}")
    answer = pickle.loads(output)
    if isinstance(answer, DebubbleError):
        raise answer
    solution, seconds = answer
    return solution, seconds


def _work() -> None:
    # The caller says who it is: it may be gone before this process can ask.
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    asked, problem = pickle.load(sys.stdin.buffer)
    answer: Answer | DebubbleError
    try:
        answer = _answer(asked, problem)
    except DebubbleError as error:
        # Errors with arguments of their own do not survive pickling; their sentence does.
        kind = CutOffError if isinstance(error, CutOffError) else InfeasibleError
        answer = kind(str(error), missing=getattr(error, "missing", None))
    sys.stdout.buffer.write(pickle.dumps(answer))


def _end_with(parent: int) -> None:
    """End this process soon after its parent was killed, which cannot end it then."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    _work()
