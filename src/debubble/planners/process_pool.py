"""Runs planners in parallel in worker processes, if their effort is worth a process.

A worker is a fresh interpreter that reads pickled (planner, problem) pairs and writes a pickled (Solution, seconds) or
error for each.  It inherits nothing from the caller, so the caller may have threads, torch or no main guard, unlike
with `concurrent.futures`, whose processes import the main module again.  A worker ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from debubble.errors import PlannerFailedError
from debubble.ir import CutOffError, DebubbleError, InfeasibleError
from debubble.planners import from_file
from debubble.planners.problem import Problem, Solution
from debubble.processes import PYTHON, raise_gc_threshold

Answer = tuple[Solution, float]
"""A planner's solution, and the seconds that it took."""

GRACE_SECONDS = 60.0
"""Seconds after its deadline at which a worker is abandoned; they include its start."""

Task = tuple[str | Callable[[Problem], Solution], Problem]
"""A planner, by name or as a module-level function, and its problem."""

Key = TypeVar("Key", bound=Hashable)

MIN_WORKER_EFFORT = 0.5
"""Least effort of a search in a worker, in seconds; starting a worker takes about as long."""
MIN_WORKER_SECONDS = 1.0
"""Tasks that are known to take at least this many wall-clock seconds run in workers."""


class TaskAnswer:
    """The answer of a task, from a worker, or from this process if no worker has begun it when it is asked for."""

    def __init__(self, task: Task, future: Future[Answer] | None = None) -> None:
        self._task, self.future = task, future

    @property
    def is_known(self) -> bool:
        """True if a worker has answered."""
        return self.future is not None and self.future.done() and not self.future.cancelled()

    def take(self) -> bool:
        """Claim the task for this process; False if a worker has begun it."""
        return self.future is None or self.future.cancel()

    def result(self) -> Answer:
        """The answer; raises the DebubbleError that the task ended with, PlannerFailedError for any other."""
        if self.future is not None and not self.take():
            return self.future.result()
        try:
            return _answer(*self._task)
        except DebubbleError:
            raise
        except Exception as error:
            raise failure(error) from error


@contextmanager
def ask_concurrently(tasks: Mapping[Key, Task], *, seconds: float = 0.0) -> Iterator[dict[Key, TaskAnswer]]:
    """Run tasks concurrently: large ones in workers on all other cores, the rest in this process.

    Workers that still search at the end, as after Ctrl-C, are killed.

    Args:
        tasks: The tasks by key.
        seconds: Wall-clock time of a task, if known.

    Yields:
        The answers by key, for `by_completion`.
    """
    workers, cores = _Workers(), os.cpu_count() or 1
    large = [key for key, task in tasks.items() if seconds >= MIN_WORKER_SECONDS or _is_worth_a_worker(*task)]
    shared = large if len(large) > 1 and cores > 1 else []
    with ThreadPoolExecutor(max_workers=max(1, cores - 1)) as pool:
        asked = {key: pool.submit(workers.ask, tasks[key]) for key in shared}
        try:
            yield {key: TaskAnswer(task, asked.get(key)) for key, task in tasks.items()}
        finally:
            for future in asked.values():
                future.cancel()
            while wait(asked.values(), timeout=0.05).not_done:
                workers.end()
            workers.close()


def by_completion(answers: Mapping[Key, TaskAnswer]) -> Iterator[Key]:
    """The keys in the order of completion; tasks that no worker has begun run in this process when asked for."""
    pending = dict(answers)
    while pending:
        key = next((key for key, answer in pending.items() if answer.is_known), None)
        if key is None:
            key = next((key for key, answer in pending.items() if answer.take()), None)
        if key is None:
            wait([answer.future for answer in pending.values() if answer.future], return_when=FIRST_COMPLETED)
            continue
        del pending[key]
        yield key


def _is_worth_a_worker(asked: str | Callable[[Problem], Solution], problem: Problem) -> bool:
    from debubble.planners.registry import planners

    searches = planners[asked].searches if isinstance(asked, str) else True
    return searches and problem.effort >= MIN_WORKER_EFFORT


def _answer(asked: str | Callable[[Problem], Solution], problem: Problem) -> Answer:
    from debubble.planners.registry import planners

    start = time.perf_counter()
    solution = planners[asked].find(problem) if isinstance(asked, str) else asked(problem)
    return solution, time.perf_counter() - start


class _Workers:
    """A pool of workers, which are reused because their imports take a while."""

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []

    def ask(self, task: Task) -> Answer:
        """Run a task in a worker; raises the DebubbleError that it ended with, PlannerFailedError for any other."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker()
            self._all.append(worker)
        answer = worker.ask(task)
        self._idle.append(worker)
        if isinstance(answer, DebubbleError):
            raise answer
        return answer

    def end(self) -> None:
        """Kill all workers."""
        for worker in tuple(self._all):
            worker.end()

    def close(self) -> None:
        """Close the pipes of all workers."""
        for worker in self._all:
            worker.close()


class _Worker:
    """A worker process, which runs tasks sequentially."""

    def __init__(self) -> None:
        command = [*PYTHON, "-m", "debubble.planners.process_pool", str(os.getpid()), *from_file.FILE_PLANNERS]
        pipe, self._open = subprocess.PIPE, ExitStack()
        # A file, as a pipe that nobody reads would block the process once it is full.
        self._stderr = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - `close` closes it
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._stderr)
        self._process = self._open.enter_context(process)

    def ask(self, task: Task) -> Answer | DebubbleError:
        """The worker's answer; raises DebubbleError if the process has ended or exceeds its deadline."""
        assert self._process.stdin
        assert self._process.stdout
        timed_out = threading.Event()
        timer = threading.Timer(task[1].begun().deadline.remaining + GRACE_SECONDS, self._kill_late, [timed_out])
        timer.daemon = True
        timer.start()
        try:
            pickle.dump(task, self._process.stdin)
            self._process.stdin.flush()
            answer: Answer | DebubbleError = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._process.wait()
            if timed_out.is_set():
                raise CutOffError(
                    f"It had not answered {GRACE_SECONDS:.0f} s after its deadline; give it more with --deadline."
                ) from None
            raise PlannerFailedError(f"It failed: {self._last_error_line()}") from None
        finally:
            timer.cancel()
        return answer

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes."""
        self.end()
        # The task may still be in the pipe's buffer.
        with suppress(OSError):
            self._open.close()

    def _kill_late(self, timed_out: threading.Event) -> None:
        timed_out.set()
        self.end()

    def _last_error_line(self) -> str:
        self._stderr.seek(0)
        return " ".join(self._stderr.read().decode(errors="replace").strip().splitlines()[-1:])


def _work() -> None:
    raise_gc_threshold()
    # The parent passes its process id, as it may be gone before this process could ask for it.
    threading.Thread(target=_exit_with, args=(int(sys.argv[1]),), daemon=True).start()
    with _answers() as answers:
        for function in sys.argv[2:]:
            from_file.named_planner(function)
        while (task := _next_task()) is not None:
            answer: Answer | DebubbleError
            try:
                answer = _answer(*task)
            except DebubbleError as error:
                # Errors with other constructor arguments cannot be unpickled; their message is kept.
                kind = CutOffError if isinstance(error, CutOffError) else InfeasibleError
                answer = kind(str(error), missing=getattr(error, "missing", None))
            except Exception as error:
                answer = failure(error)
            pickle.dump(answer, answers)
            answers.flush()


def failure(error: Exception) -> PlannerFailedError:
    """The error for a planner that raised this exception, with its location."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = f"{type(error).__name__}{f': {error}' * bool(str(error))}"
    return PlannerFailedError(f"It failed at {Path(place.filename).name}, line {place.lineno}: {words}.")


def _answers() -> BinaryIO:
    """The pipe for answers; stdout is redirected to stderr for what planners print."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return pipe


def _next_task() -> Any:
    """The next task; None at the end."""
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None


def _exit_with(parent: int) -> None:
    """End this process soon after its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    _work()
