"""The published schedules take exactly the time and memory that their sources state."""

from fractions import Fraction
from typing import Any

import pytest

import debubble as db
from debubble.ir import Kind
from tests.support.schedule_cases import timeline

SIZES = [(2, 4), (3, 5), (4, 8), (4, 16), (5, 17), (8, 16), (8, 33)]


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 1), (4, 3), (8, 5)])
def test_1f1b_takes_m_plus_p_minus_1_passes_and_holds_min_m_p_minus_s(p: Any, m: Any) -> None:
    run = timeline("1f1b", p, m)
    assert run.makespan == 3 * (m + p - 1)
    assert run.peak_memory == tuple(min(m, p - s) for s in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_divides_the_bubble_by_v(p: Any, m: Any, v: int) -> None:
    assert timeline("interleaved", p, m, v).makespan == 3 * m + Fraction(3 * (p - 1), v)


@pytest.mark.parametrize(("p", "v"), [(4, 2), (8, 2), (8, 4), (4, 3)])
def test_interleaved_holds_1_plus_p_minus_1_over_p_v_of_p(p: int, v: int) -> None:
    assert timeline("interleaved", p, 3 * p, v).peak_memory[0] == p * (1 + Fraction(p - 1, p * v))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_mindspores_interleaved_order_is_as_fast_as_megatrons_in_1f1bs_memory(p: int, m: int, v: int) -> None:
    run = timeline("interleaved-less-memory", p, m, v)
    assert run.makespan == 3 * m + Fraction(3 * (p - 1), v)
    assert run.peak_memory == tuple(p - Fraction(d, v) for d in range(p))


def test_mindspores_interleaved_order_warms_up_with_v_minus_1_times_p_plus_p_minus_s_minus_1_forwards() -> None:
    schedule = db.schedules["interleaved-less-memory"](devices=4, micro_batches=8, chunks=2)
    kinds = [[op.kind for op in order] for order in schedule.orders]
    # Behind the warm-up comes the forward of the first pair of one forward and one backward.
    assert [order.index(Kind.B) for order in kinds] == [4 + 4 - s - 1 + 1 for s in range(4)]


def test_with_messages_mindspores_interleaved_order_is_slower() -> None:
    costs = db.StageCosts.of(stages=8, communication=Fraction(1, 4))
    times = [
        db.simulate(db.schedules[name](devices=4, micro_batches=8, chunks=2), costs).makespan
        for name in ("interleaved", "interleaved-less-memory")
    ]
    assert times[0] < times[1]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h1_takes_a_third_of_the_bubble_in_1f1bs_memory(p: Any, m: Any) -> None:
    run = timeline("zb-h1", p, m)
    assert run.makespan == 3 * m + p - 1
    assert run.peak_memory == (min(m, p),) * p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 5), (4, 8), (4, 16), (5, 17), (8, 16), (8, 33)])
def test_zb_h2_has_no_bubble_within_a_devices_span(p: int, m: int) -> None:
    run = timeline("zb-h2", p, m)
    assert run.span == 3 * m
    assert run.makespan == 3 * m + p - 1
    assert run.peak_memory == (2 * p - 1,) * p
