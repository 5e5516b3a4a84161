"""Planners that search, in parallel in processes of their own, where that is worth a process.

Each worker is a fresh interpreter that reads one pickled (planner, problem) after the other, and writes a pickled
(Solution, seconds) or error for each.  Nothing of the caller's process is inherited, so it does not matter whether it
has threads, torch or no main guard, which the processes of `concurrent.futures` would import again.  A worker ends when
its parent is gone.
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
from debubble.planners.problem import Problem, Solution
from debubble.processes import PYTHON, raise_gc_threshold

Answer = tuple[Solution, float]
"""A planner's solution, and the seconds that it took."""

SECONDS_TO_START = 60.0
"""Seconds beyond its deadline, and to start, after which a worker is abandoned."""


Task = tuple[str | Callable[[Problem], Solution], Problem]
"""A planner, by name or as a function at the top of a module, and what it is asked."""

Key = TypeVar("Key", bound=Hashable)

WORKER = 0.5
"""Effort of a search from which it is worth a worker, in seconds: to start one takes about as long."""
WORKER_SECONDS = 1.0
"""Seconds on the clock from which any task is, where it is known how long tasks take."""


class TaskAnswer:
    """The answer of a task, which a worker or, where none has begun it when it is asked for, this process works out."""

    def __init__(self, task: Task, future: Future[Answer] | None = None) -> None:
        self._task, self.future = task, future

    @property
    def is_known(self) -> bool:
        """True if a worker has answered."""
        return self.future is not None and self.future.done() and not self.future.cancelled()

    def take(self) -> bool:
        """Keep the task for this process; False if a worker has begun it."""
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
def side_by_side(tasks: Mapping[Key, Task], *, seconds: float = 0.0) -> Iterator[dict[Key, TaskAnswer]]:
    """Give tasks that are worth it to workers, one for every core but this process's own, which takes its share.

    Workers that still search at the end, as after a Ctrl-C, are ended.

    Args:
        tasks: The planners and what each is asked, by key.
        seconds: The time on the clock that a task takes, if that is known.

    Yields:
        The answers by the tasks' keys, to be asked for `by_completion`.
    """
    workers, cores = _Workers(), os.cpu_count() or 1
    worth = [key for key, task in tasks.items() if seconds >= WORKER_SECONDS or _is_worth_a_worker(*task)]
    shared = worth if len(worth) > 1 and cores > 1 else []
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
    """The keys as they are answered; this process works out what no worker has begun, each when it is asked for."""
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
    return searches and problem.effort >= WORKER


def _answer(asked: str | Callable[[Problem], Solution], problem: Problem) -> Answer:
    from debubble.planners.registry import planners

    start = time.perf_counter()
    solution = planners[asked].find(problem) if isinstance(asked, str) else asked(problem)
    return solution, time.perf_counter() - start


class _Workers:
    """The workers of some tasks; one that has answered is asked the next task, as its imports take a while."""

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []

    def ask(self, task: Task) -> Answer:
        """Have a task answered; raises the DebubbleError that it ended with, PlannerFailedError for any other."""
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
        """End all of them, whatever they do."""
        for worker in tuple(self._all):
            worker.end()

    def close(self) -> None:
        """Close their pipes, once none of them is asked anything."""
        for worker in self._all:
            worker.close()


class _Worker:
    """A process that answers one task after the other."""

    def __init__(self) -> None:
        command = [*PYTHON, "-m", "debubble.planners.process_pool", str(os.getpid())]
        pipe, self._open = subprocess.PIPE, ExitStack()
        # A pipe that nobody reads meanwhile would stop a process that says much.
        self._said = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - `close` closes it
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said)
        self._process = self._open.enter_context(process)

    def ask(self, task: Task) -> Answer | DebubbleError:
        """The answer of the process; raises a DebubbleError if it has ended, or after its timer."""
        assert self._process.stdin
        assert self._process.stdout
        late = threading.Event()
        timer = threading.Timer(task[1].begun().deadline.remaining + SECONDS_TO_START, self._give_up, [late])
        timer.daemon = True
        timer.start()
        try:
            pickle.dump(task, self._process.stdin)
            self._process.stdin.flush()
            answer: Answer | DebubbleError = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._process.wait()
            if late.is_set():
                raise CutOffError(
                    f"It had not answered {SECONDS_TO_START:.0f} s after its deadline; give it more with --deadline."
                ) from None
            raise PlannerFailedError(f"It failed: {self._last_words()}") from None
        finally:
            timer.cancel()
        return answer

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close its pipes, and end it."""
        self.end()
        # What it was asked may not have reached it.
        with suppress(OSError):
            self._open.close()

    def _give_up(self, late: threading.Event) -> None:
        late.set()
        self.end()

    def _last_words(self) -> str:
        self._said.seek(0)
        return " ".join(self._said.read().decode(errors="replace").strip().splitlines()[-1:])


def _work() -> None:
    raise_gc_threshold()
    # The caller says who it is: it may be gone before this process can ask.
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    with _answers() as answers:
        while (task := _next_task()) is not None:
            answer: Answer | DebubbleError
            try:
                answer = _answer(*task)
            except DebubbleError as error:
                # Errors with arguments of their own do not survive pickling; their sentence does.
                kind = CutOffError if isinstance(error, CutOffError) else InfeasibleError
                answer = kind(str(error), missing=getattr(error, "missing", None))
            except Exception as error:
                answer = failure(error)
            pickle.dump(answer, answers)
            answers.flush()


def failure(error: Exception) -> PlannerFailedError:
    """The error of a planner that has raised this, with where it did."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = f"{type(error).__name__}{f': {error}' * bool(str(error))}"
    return PlannerFailedError(f"It failed at {Path(place.filename).name}, line {place.lineno}: {words}.")


def _answers() -> BinaryIO:
    """The pipe for answers; what planners print goes where errors go."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return pipe


def _next_task() -> Any:
    """The next task that is asked, None once there are no more."""
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None


def _end_with(parent: int) -> None:
    """End this process soon after its parent was killed, which cannot end it then."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    _work()
