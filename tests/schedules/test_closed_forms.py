from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from debubble.ir import StageCosts
from debubble.schedules import schedules
from debubble.simulator import simulate
from tests.support.schedule_cases import timeline

SIZES = [(2, 4), (3, 5), (8, 33)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_divides_the_bubble_by_v(p: Any, m: Any, v: int) -> None:
    assert timeline("interleaved", p, m, v).makespan == 3 * m + Fraction(3 * (p - 1), v)


@pytest.mark.parametrize(("p", "v"), [(8, 4), (4, 3)])
def test_interleaved_has_the_peak_of_its_closed_form(p: int, v: int) -> None:
    assert timeline("interleaved", p, 3 * p, v).peak_memory[0] == p * (1 + Fraction(p - 1, p * v))


@pytest.mark.parametrize(("p", "m", "v"), [(3, 6, 3), (4, 12, 2), (8, 16, 4)])
def test_interleaved_order_of_mindspore_has_1f1b_memory(p: int, m: int, v: int) -> None:
    run = timeline("interleaved-less-memory", p, m, v)
    assert run.makespan == 3 * m + Fraction(3 * (p - 1), v)
    assert run.peak_memory == tuple(p - Fraction(d, v) for d in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h1_has_a_third_of_the_bubble_in_1f1b_memory(p: Any, m: Any) -> None:
    run = timeline("zb-h1", p, m)
    assert run.makespan == 3 * m + p - 1
    assert run.peak_memory == (min(m, p),) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h2_has_no_bubble_within_a_devices_span(p: int, m: int) -> None:
    run = timeline("zb-h2", p, m)
    assert run.span == 3 * m
    assert run.makespan == 3 * m + p - 1
    assert run.peak_memory == (2 * p - 1,) * p


@pytest.mark.parametrize("times", [*product((1, 2, 3), repeat=3)])
@pytest.mark.parametrize("name", ["zb-h1", "seq1f1b-zb", "group-interleaved"])
def test_weight_gradients_leave_the_bubble_of_the_formula(name: str, times: tuple[int, int, int]) -> None:
    f, i, w = times
    chunks = schedules[name](devices=4, micro_batches=16).placement.chunks
    costs = StageCosts.of(stages=4 * chunks, forward=f, backward_input=i, backward_weight=w)
    run = simulate(schedules[name](devices=4, micro_batches=16, costs=costs), costs)
    assert run.makespan == 16 * chunks * (f + i + w) + 3 * (f + i - min(times))


@pytest.mark.parametrize("times", [*product((1, 2, 3), repeat=3)])
def test_zb_h2_has_a_bubble_in_its_span_if_weights_are_short(times: tuple[int, int, int]) -> None:
    f, i, w = times
    costs = StageCosts.of(stages=4, forward=f, backward_input=i, backward_weight=w)
    run = simulate(schedules["zb-h2"](devices=4, micro_batches=16, costs=costs), costs)
    assert run.span == 16 * (f + i + w) + 3 * max(0, f + i - 2 * min(f, w))
