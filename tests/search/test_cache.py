import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from tools.build_cache import shipped_problems

from debubble.ir import Placement, StageCosts
from debubble.schedules import schedules
from debubble.search import cache
from debubble.search.annealing.search import search
from debubble.search.bounds import lower_bound
from debubble.search.effort import SIMULATION, Effort
from debubble.search.micro_batch_count import PLACES, resized
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


def test_a_schedule_is_found_for_another_number_of_micro_batches() -> None:
    twelve = problem_of(micro_batches=12)
    schedule = schedules["adaoffload"](devices=3, micro_batches=12, costs=twelve.costs)
    cache.keep(twelve, Incumbent(schedule=schedule, value=twelve.value(schedule), bound=0, source="start"))
    for micro_batches in (9, 20):
        problem = problem_of(micro_batches=micro_batches)
        found = cache.nearest_of_any_length(problem, cache.folder(), effort=Effort(1))
        assert found is not None
        made = schedules["adaoffload"](devices=3, micro_batches=micro_batches, costs=problem.costs)
        assert problem.value(found) == problem.value(made)


def test_fitting_a_schedule_to_another_number_is_counted() -> None:
    cache.keep(problem_of(micro_batches=12), searched(problem_of(micro_batches=12)))
    same, other = Effort(1), Effort(1)
    cache.nearest_of_any_length(problem_of(micro_batches=12), cache.folder(), effort=same)
    cache.nearest_of_any_length(problem_of(micro_batches=20), cache.folder(), effort=other)
    assert (same.spent, other.spent) == (0, PLACES * SIMULATION * 3 * 20)


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


@pytest.mark.parametrize("micro_batches", [8, 11, 20])
def test_1f1b_of_12_micro_batches_becomes_1f1b_of_any_number(micro_batches: int) -> None:
    costs = StageCosts.of(stages=4)
    twelve = schedules["1f1b"](devices=4, micro_batches=12, costs=costs)
    problem = OrderProblem(placement=Placement.linear(4), micro_batches=micro_batches, costs=costs)
    found = resized(twelve, problem)
    assert found is not None
    assert found.orders == schedules["1f1b"](devices=4, micro_batches=micro_batches, costs=costs).orders


def test_a_shipped_schedule_that_is_periodic_stays_optimal() -> None:
    shipped = next(p for p in shipped_problems() if (p.devices, p.micro_batches, p.costs.memory_limit) == (4, 16, (8,)))
    schedule = cache.nearest(shipped, cache.SHIPPED)
    assert schedule is not None
    problem = replace(shipped, micro_batches=32)
    found = resized(schedule, problem)
    assert found is not None
    assert problem.value(found) == lower_bound(problem)
