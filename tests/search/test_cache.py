import multiprocessing
from pathlib import Path

import pytest

from debubble.search import cache
from debubble.search.annealing.search import search
from debubble.search.problem import Incumbent, OrderProblem
from tests.search.orders import uniform


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "debubble" / "schedules"


def problem_of(forward: float = 10, micro_batches: int = 5) -> OrderProblem:
    return uniform(3, micro_batches, offload=15, limit=4, communication=0, forward=forward)


def searched(problem: OrderProblem, steps: int = 500) -> Incumbent:
    *_, best = search(problem, steps=steps)
    return best


def test_a_similar_problem_finds_the_schedule_and_others_do_not() -> None:
    best = searched(problem_of())
    cache.keep(problem_of(), best)
    found = cache.nearest(problem_of(forward=10.4), cache.folder())
    assert found is not None
    assert found.orders == best.schedule.orders
    assert cache.nearest(problem_of(forward=90), cache.folder()) is None
    assert cache.nearest(problem_of(micro_batches=6), cache.folder()) is None


def test_a_better_entry_replaces_a_worse_one_only() -> None:
    problem = problem_of()
    worse, better = next(search(problem, steps=1)), searched(problem, steps=5000)
    assert better.value < worse.value
    for incumbent in (better, worse):
        cache.keep(problem, incumbent)
    found = cache.nearest(problem, cache.folder())
    assert found is not None
    assert found.orders == better.schedule.orders


def test_a_damaged_entry_is_as_good_as_none(own_folder: Path) -> None:
    cache.keep(problem_of(), searched(problem_of()))
    (entry,) = own_folder.rglob("*.json")
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
    found = searched(problem, steps=steps)
    for _ in range(30):
        cache.write(place, problem, found)


def test_processes_that_write_at_once_leave_a_whole_entry(own_folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=keep_repeatedly, args=(steps,)) for steps in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert cache._read(own_folder / "shared" / "entry.json") is not None
    assert not list((own_folder / "shared").glob(".entry*"))
