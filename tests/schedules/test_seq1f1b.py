from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import InputError, Kind, Op, Placement, Schedule, ScheduleError
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.schedule_checks import check
from debubble.simulator import simulate

DEVICES, SEQUENCES, SLICES = st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)


def schedule_of(name: str, p: int, m: int, n: int, **options: Any) -> Schedule:
    return db.schedules[name](devices=p, micro_batches=m, slices=n, **options)


@given(DEVICES, SEQUENCES, SLICES)
def test_the_bubble_is_that_of_one_slice(p: int, m: int, n: int) -> None:
    """No order of fused backwards is faster: all slices follow the first forward path to the last stage."""
    timeline = simulate(schedule_of("seq1f1b", p, m, n), db.StageCosts.of(stages=p))
    assert timeline.makespan == (m * n + p - 1) * 3
    # A stage keeps n - 1 slices more than with 1F1B.
    assert timeline.peak_memory == tuple(min(m * n, p - s + n - 1) for s in range(p))


@given(DEVICES, SEQUENCES, SLICES)
def test_split_backwards_leave_a_third_of_the_bubble(p: int, m: int, n: int) -> None:
    timeline = simulate(schedule_of("seq1f1b-zb", p, m, n), db.StageCosts.of(stages=p))
    if (m - 1) * n >= p - 1:
        assert timeline.makespan == m * n * 3 + (p - 1)


@settings(max_examples=40)
@given(st.integers(2, 5), SEQUENCES, st.integers(1, 8), st.integers(2, 3))
def test_chunks_divide_the_bubble(p: int, m: int, n: int, v: int) -> None:
    timeline = simulate(schedule_of("seq1f1b-interleaved", p, m, n, chunks=v), db.StageCosts.of(stages=p * v))
    if n >= p:
        assert timeline.makespan == (m * n * v + p - 1) * 3


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_one_slice_has_the_order_of_undivided_sequences(name: str) -> None:
    undivided = db.schedules[name](devices=3, micro_batches=6)
    sliced = {"1f1b": "seq1f1b", "zb-h1": "seq1f1b-zb", "interleaved": "seq1f1b-interleaved"}[name]
    assert schedule_of(sliced, 3, 6, 1).orders == undivided.orders


def test_zero_slices_are_refused() -> None:
    with pytest.raises(InputError, match="A sequence needs at least one slice, not 0"):
        schedule_of("seq1f1b", 2, 1, 0)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("0F1 0F0 0B1 0B0", "0F1 is slice 1 of its sequence, where slice 0 comes next"),
        ("0F0 0F1 0B0 0B1", "0B0 is slice 0 of its sequence, where slice 1 comes next"),
    ],
)
def test_slices_out_of_order_are_refused(order: str, reason: str) -> None:
    plain = Schedule.of("mine", Placement.linear(1), 2, [order.split()])
    with pytest.raises(ScheduleError, match=reason):
        check(Schedule(**{**vars_of(plain), "slices": 2}))


def vars_of(schedule: Schedule) -> dict[str, Any]:
    return {
        "name": schedule.name, "placement": schedule.placement, "micro_batches": schedule.micro_batches,
        "orders": schedule.orders,
    }  # fmt: skip


def test_slices_that_divide_no_sequence_are_refused() -> None:
    plain = Schedule.of("mine", Placement.linear(1), 1, [["0F0", "0B0"]])
    with pytest.raises(ScheduleError, match="1 micro-batches are not whole sequences of 2 slices"):
        check(Schedule(**{**vars_of(plain), "slices": 2}))


COSTS = db.StageCosts.of(
    stages=1, forward=5, backward_input=7, backward_weight=2, recompute=5, activation=10, activation_recomputed=4,
    offload=10, slices=3, attention_scale=(1, 3, 5), attention_forward=2, attention_backward=3, attention_recompute=2,
    keys_and_values=4, key_value_gradient=6,
)  # fmt: skip


@pytest.mark.parametrize("j", [0, 5])
def test_attention_grows_with_the_tokens_before_a_slice(j: int) -> None:
    costs, longer = OpCosts(costs=COSTS), 2 * (j % 3)
    assert costs.time(Op(Kind.F, 0, j)) == 5 + 2 * longer
    assert costs.time(Op(Kind.B, 0, j)) == 9 + 3 * longer
    assert costs.time(Op(Kind.W, 0, j)) == 2
    assert costs.time(Op(Kind.R, 0, j), explicit=True) == 5 + 2 * longer
    fused = OpCosts(costs=COSTS, fused_recompute=frozenset({0}))
    assert fused.time(Op(Kind.B, 0, j)) == 14 + 5 * longer


def test_gradients_of_keys_live_from_the_last_slices_backward() -> None:
    costs = OpCosts(costs=COSTS)
    assert [costs.allocates(Op(Kind.B, 0, j)) for j in range(3)] == [0, 0, 12]
    assert [costs.frees(Op(Kind.B, 0, j)) for j in range(3)] == [16, 16, 10]


def test_keys_and_values_are_not_offloaded() -> None:
    costs = OpCosts(costs=COSTS, offload_fraction={0: Fraction(1, 2)})
    assert costs.frees(Op(Kind.O, 0, 0)) == 3
    assert costs.time(Op(Kind.O, 0, 0)) == 3


def test_costs_of_another_number_of_slices_are_refused() -> None:
    with pytest.raises(InputError, match="The costs are for 3 slices of a sequence, but the schedule 'seq1f1b' has 2"):
        simulate(schedule_of("seq1f1b", 1, 3, 2), COSTS)
