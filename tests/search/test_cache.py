import multiprocessing
from pathlib import Path

import pytest

from debubble.search import cache
from debubble.search.annealing.search import search
from debubble.search.problem import Incumbent, OrderProblem
from tests.search.orders import uniform


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "debubble" / "schedules"


def problem_of(forward: float = 10, micro_batches: int = 5) -> OrderProblem:
    return uniform(3, micro_batches, offload=15, limit=4, communication=0, forward=forward)


def searched(problem: OrderProblem, steps: int = 500) -> Incumbent:
    *_, best = search(problem, steps=steps)
    return best


def test_only_a_similar_problem_finds_the_schedule() -> None:
    best = searched(problem_of())
    cache.keep(problem_of(), best)
    cached = cache.nearest(problem_of(forward=10.4), cache.folder())
    assert cached is not None
    assert cached.orders == best.schedule.orders
    assert cache.nearest(problem_of(forward=90), cache.folder()) is None
    assert cache.nearest(problem_of(micro_batches=6), cache.folder()) is None


def test_only_a_better_entry_replaces_another() -> None:
    problem = problem_of()
    worse, better = next(search(problem, steps=1)), searched(problem, steps=5000)
    assert better.value < worse.value
    for incumbent in (better, worse):
        cache.keep(problem, incumbent)
    cached = cache.nearest(problem, cache.folder())
    assert cached is not None
    assert cached.orders == better.schedule.orders


def test_a_damaged_entry_is_ignored(cache_folder: Path) -> None:
    cache.keep(problem_of(), searched(problem_of()))
    (entry,) = cache_folder.rglob("*.json")
    entry.write_text(entry.read_text()[:100])
    assert cache.nearest(problem_of(), cache.folder()) is None


def test_an_unwritable_folder_does_not_fail_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    cache.keep(problem_of(), searched(problem_of()))
    assert cache.nearest(problem_of(), cache.folder()) is None


def keep_repeatedly(steps: int) -> None:
    problem, place = problem_of(), cache.folder() / "shared" / "entry.json"
    incumbent = searched(problem, steps=steps)
    for _ in range(30):
        cache.write(place, problem, incumbent)


def test_concurrent_writers_leave_a_complete_entry(cache_folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=keep_repeatedly, args=(steps,)) for steps in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert cache._read(cache_folder / "shared" / "entry.json") is not None
    assert not list((cache_folder / "shared").glob(".entry*"))
