from collections.abc import Callable
from typing import Any

import pytest

import debubble as db
from debubble.ir import Number


def simulated_zb(F: Any, I: Any, W: Any, C: Any, limit: Any, p: int = 4, m: int = 8) -> Any:  # noqa: E741 - the paper's letters
    costs = db.StageCosts.of(
        stages=p, forward=F, backward_input=I, backward_weight=W, communication=C, activation=1,
        activation_after_input=1, memory_limit=limit,
    )  # fmt: skip
    return db.simulate(db.schedules["zb"](devices=p, micro_batches=m, costs=costs), costs)


@pytest.mark.parametrize(("limit", "optimum"), [(1, 72), (4, 27)])
def test_zb_is_optimal_without_search(limit: int, optimum: int) -> None:
    assert simulated_zb(1, 1, 1, 0, limit).makespan == optimum


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "limit", "optimum"),
    [((1, 1, 1, 0), 2, 41), ((1, 1, 1, 0), 3, 31), ((10, 11, 9, 1), 2, 440), ((10, 11, 9, 1), 3, 334)],
)
def test_zb_below_1f1b_memory_reaches_the_proven_optimum(times: Any, limit: int, optimum: int) -> None:
    forward, backward_input, backward_weight, communication = times
    assert simulated_zb(forward, backward_input, backward_weight, communication, limit).makespan == optimum


def test_zb_refuses_a_limit_below_one_activation() -> None:
    with pytest.raises(db.InfeasibleError, match="raise the memory limit"):
        simulated_zb(1, 1, 1, 0, limit=0)


def test_a_limit_below_static_memory_names_the_device() -> None:
    costs = db.StageCosts.of(stages=4, static=[1, 3, 1, 1], memory_limit=2)
    with pytest.raises(db.InfeasibleError, match="what is static on device 1 is 1 more than its limit"):
        db.schedules["zb"](devices=4, micro_batches=8, costs=costs)


@pytest.mark.parametrize("model", ["receiver", "blocking"])
def test_zb_supports_other_communication_models(model: Any) -> None:
    costs = db.StageCosts.of(
        stages=4, communication=0.5, communication_model=model, activation=1, activation_after_input=1, memory_limit=2
    )
    assert max(db.simulate(db.schedules["zb"](devices=4, micro_batches=6, costs=costs), costs).peak_memory) == 2


def test_zb_respects_a_limit_per_device() -> None:
    costs = db.StageCosts.of(stages=4, activation=2, memory_limit=[8, 6, 4, 8])
    schedule = db.schedules["zb"](devices=4, micro_batches=8, costs=costs, steps=0)
    peaks = db.simulate(schedule, costs).peak_memory
    assert all(peak <= limit for peak, limit in zip(peaks, [8, 6, 4, 8], strict=True))


def peak_of(name: str) -> Callable[[int, int, int], Number]:
    peak = db.schedules[name].peak
    assert peak is not None
    return peak


@pytest.mark.parametrize(("name", "peaks"), [("v-min", {4: 2, 8: 4, 16: 6}), ("v-half", {4: 3, 8: 5, 16: 9})])
def test_v_shapes_declare_the_published_memory(name: str, peaks: Any) -> None:
    assert {p: peak_of(name)(p, 4 * p, 2) for p in peaks} == peaks


def test_v_half_is_built_for_the_given_costs() -> None:
    forward = [2, 1, 1, 1, 1, 1, 1, 2]
    costs = db.StageCosts.of(stages=8, forward=forward, communication=1, activation=1, activation_after_input=1)
    build = db.schedules["v-half"]
    for_them, for_even = (build(devices=4, micro_batches=16, costs=c) for c in (costs, db.StageCosts.of(stages=8)))
    assert db.simulate(for_them, costs).makespan < db.simulate(for_even, costs).makespan


def test_v_half_bounds_the_memory_of_a_large_second_chunk() -> None:
    activation = [2] * 27 + [5]
    costs = db.StageCosts.of(stages=28, forward=14, activation=activation, activation_after_input=2)
    schedule = db.schedules["v-half"](devices=14, micro_batches=38, costs=costs, tries=4)
    assert db.simulate(schedule, costs).peak_memory[0] <= 8 * (2 + 5)


@pytest.mark.parametrize("name", ["zb", "v-half"])
def test_a_search_of_recomputing_stages_is_refused(name: str) -> None:
    with pytest.raises(db.InputError, match="searches no further where stages recompute: leave out its steps"):
        db.schedules[name](devices=4, micro_batches=8, recomputing=frozenset({0}), steps=100)
