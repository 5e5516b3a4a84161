"""Overlaps of transfers with the units of a stage: no bytes of a unit move while the unit needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs.partition import Partition
from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Kind, Number, Op, Placement, RunOptions
from debubble.ir.lowering.op_costs import OpCosts
from debubble.planners.model_problem import problem_of


def unit(forward: int, activation: int, full: int, *, backward: int = 0, recompute: int = 0) -> Unit:
    return Unit(
        type="unit",
        layer=None,
        forward=forward,
        backward_input=backward or forward,
        backward_weight=forward,
        static=0,
        strategies={"none": Strategy(activation), "full": Strategy(full, recompute)},
    )


def units_of(*units: Unit, bandwidth: Number = 1) -> Units:
    return Units(units=units, offload_bandwidth=bandwidth)


def latest_lead(
    times: Sequence[Number], sizes: Sequence[Number], transfer: Sequence[Number], share: Fraction
) -> Number:
    """The longest lead with which no unit's bytes leave before the unit has finished."""
    ends, before = [*accumulate(times)], [0, *accumulate(sizes)]
    queued = [*accumulate(transfer, initial=0)]
    budget = share * before[-1]
    moved = [i for i, size in enumerate(sizes) if size and before[i] < budget]
    return min((ends[-1] - ends[i] + queued[i] for i in moved), default=ends[-1])


def latest_recompute_lead(
    times: Sequence[Number], sizes: Sequence[Number], transfer: Sequence[Number], share: Fraction
) -> Number:
    """The longest lead with which no unit recomputes before its bytes have returned, in the order of units."""
    begins, before = [*accumulate(times, initial=0)], [*accumulate(sizes, initial=0)]
    budget = share * before[-1]
    portions = [min(size, max(budget - b, 0)) for size, b in zip(sizes, before, strict=False)]
    moved = [Fraction(p) * time / size if size else 0 for p, size, time in zip(portions, sizes, transfer, strict=True)]
    return min((begins[i] + sum(moved[i + 1 :]) for i, portion in enumerate(portions) if portion), default=begins[-1])


@st.composite
def stages(draw: st.DrawFn) -> tuple[tuple[Unit, ...], str]:
    number = st.integers(1, 9)
    sizes = draw(st.lists(st.tuples(number, st.integers(1, 9), st.integers(0, 9), number, number), min_size=1))
    units = [
        unit(f, size, min(less, size), backward=b, recompute=r) for f, size, less, b, r in sizes[:6]
    ]  # fmt: skip
    return tuple(units), draw(st.sampled_from(["none", "full"]))


@given(
    stage=stages(),
    recomputes=st.booleans(),
    quarters=st.integers(1, 4),
    bandwidth=st.sampled_from([Fraction(1, 3), 1, 4]),
)
@settings(max_examples=60, deadline=None)
def test_no_bytes_of_a_unit_move_while_it_needs_them(
    stage: tuple[tuple[Unit, ...], str], recomputes: bool, quarters: int, bandwidth: Number
) -> None:
    stage_units, planned = stage
    strategy = planned if recomputes else "none"
    share, units = Fraction(quarters, 4), units_of(*stage_units, bandwidth=bandwidth)
    costs = units.stage_costs(Partition.cut(units, [len(stage_units)], strategy=planned), Placement.linear(1))
    fused = frozenset({0} if strategy == "full" else ())
    op_costs = OpCosts(costs=costs, fused_recompute=fused, offload_fraction={0: share})
    saved = [u.strategies[strategy].activation for u in stage_units]
    transfer = [Fraction(size) / Fraction(bandwidth) for size in saved]
    recompute = [u.strategies[strategy].recompute for u in stage_units]
    inputs = [u.backward_input + time for u, time in zip(stage_units, recompute, strict=True)]
    times = {
        Kind.O: [u.forward for u in stage_units],
        Kind.I: inputs,
        Kind.B: [time + u.backward_weight for u, time in zip(stage_units, inputs, strict=True)],
    }
    recompute_lead = op_costs.lead(Op(Kind.R, 0, 0), explicit=True)
    if planned == strategy:
        assert 0 <= float(recompute_lead) <= float(latest_recompute_lead(recompute, saved, transfer, share)) + 1e-9
    for kind, durations in times.items():
        lead = float(op_costs.lead(Op(kind, 0, 0)))
        assert 0 <= lead <= float(latest_lead(durations, saved, transfer, share)) + 1e-9


@pytest.mark.parametrize("bandwidth", [Fraction(1, 4), 4])
def test_equal_units_overlap_as_much_as_possible(bandwidth: Number) -> None:
    equal = [unit(4, 4, 1)] * 4
    costs = units_of(*equal, bandwidth=bandwidth).stage_costs([[(i, "none") for i in range(4)]], Placement.linear(1))
    transfer = [Fraction(4) / bandwidth] * 4
    lead = OpCosts(costs=costs).lead(Op(Kind.O, 0, 0))
    assert lead == latest_lead([4] * 4, [4] * 4, transfer, Fraction(1)) == Fraction(3, 4) * min(16, sum(transfer))


def test_a_stage_of_one_unit_has_no_overlap() -> None:
    costs = units_of(unit(4, 4, 1)).stage_costs([[(0, "none")]], Placement.linear(1))
    assert (costs.offload_overlap, costs.reload_overlap, costs.recompute_overlap) == ((0,), (0,), (0,))


def test_halves_that_recompute_together_are_one_transfer() -> None:
    half = Unit(
        type="mlp", layer=0, forward=1, backward_input=1, backward_weight=1, static=0,
        strategies={"none": Strategy(2), "full": Strategy(1, 1, after_full=0)},
    )  # fmt: skip
    units = units_of(half, half)
    costs = units.stage_costs([[(0, "full"), (1, "full")]], Placement.linear(1))
    assert costs.reload_overlap == (0,)


def test_a_partly_recomputed_stage_has_no_overlap() -> None:
    units = units_of(*[unit(4, 4, 1)] * 4)
    costs = units.stage_costs([[(i, "full") for i in range(4)]], Placement.linear(1))
    mixed = OpCosts(costs=costs, fused_recompute=frozenset({0}), recompute_fraction={0: Fraction(1, 2)})
    assert mixed.lead(Op(Kind.O, 0, 0)) == 0
    assert OpCosts(costs=costs, fused_recompute=frozenset({0})).lead(Op(Kind.O, 0, 0)) > 0


def test_module_offload_of_frameworks_has_no_overlap() -> None:
    problem = problem_of(
        db.models["llama2-13b"], db.Cluster.parse("8xA100-40GB"), RunOptions(sequence_length=4096), micro_batches=16
    )
    units = replace(problem.units, module_bandwidth=problem.units.offload_bandwidth)
    partition = [[(i, "none") for i in range(len(units.units))]]
    ours, theirs = (model.stage_costs(partition, Placement.linear(1)) for model in (units, units.offloading_modules()))
    assert ours.offload_overlap[0] > 0.9
    assert theirs.offload_overlap == (0,)
