"""Obscura's plans: recomputation, swapping and an uneven half-layer partition, under a limit that 1F1B exceeds."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.ir import Kind
from debubble.views.comparison import as_dict, compare
from tests.support.run_cases import (
    LLAMA8,
    assert_reference_equal,
    kinds_of,
    on_lanes,
    overlapping,
    plan_for,
    run,
)

PAGE = " ".join((Path(__file__).parents[2] / "docs/notes/obscura.md").read_text().split())


@pytest.fixture(scope="module")
def limit(peak_of_1f1b: Any) -> Any:
    return peak_of_1f1b // 2


@pytest.fixture(scope="module")
def plan(units: Any, limit: Any) -> Any:
    return plan_for("obscura", LLAMA8, units=units, limit=limit)


@pytest.fixture(scope="module")
def ran(plan: Any) -> Any:
    return run(plan)


def test_1f1b_breaks_the_limit(units: Any, limit: Any) -> None:
    with pytest.raises(db.InfeasibleError):
        plan_for("dapple", LLAMA8, units=units, limit=limit)
    ran = run(plan_for("dapple", LLAMA8, units=units), steps=1)
    assert max(peak for peak, _, _ in ran) > 1.9 * limit


def test_the_plan_recomputes_swaps_and_divides_layers(plan: Any) -> None:
    counts = [len(stage) for stage in plan.partition]
    assert {Kind.O, Kind.L} <= kinds_of(plan)
    assert plan.schedule.fused_recompute
    assert max(counts) - min(counts) > 1
    assert any(stage[-1].type == "attention" for stage in plan.partition)  # the MLP of its layer is in the next stage


def test_the_plans_gradients_are_the_references(plan: Any) -> None:
    assert_reference_equal(plan)


def test_the_plans_counted_peaks_are_within_the_limit(plan: Any, ran: Any, limit: Any) -> None:
    swapping = {stage for stage, _ in plan.schedule.offloaded}
    for stage, (peak, elsewhere, _) in enumerate(ran):
        assert 0.9 * plan.costs.activation_recomputed[stage] < peak <= limit
        assert (elsewhere > 0) == (stage in swapping)


def test_the_page_has_the_limit_and_the_counted_peaks(plan: Any, ran: Any, limit: Any, peak_of_1f1b: Any) -> None:
    assert f"1F1B keeps {peak_of_1f1b:,} bytes" in PAGE
    assert f"under half of that ({limit:,})" in PAGE
    written = PAGE.split("The counted peaks are ")[1].split(" bytes")[0]
    stated = [int(peak.replace(",", "")) for peak in re.findall(r"\d+,\d+", written)]
    swapping = {stage for stage, _ in plan.schedule.offloaded}
    for stage, ((peak, _, _), min_peak) in enumerate(zip(ran, stated, strict=True)):
        # A late copy to the host keeps its bytes for longer.
        assert min_peak <= peak <= limit if stage in swapping else peak == min_peak


def test_swaps_overlap_compute_and_compare_reads_the_trace(plan: Any, ran: Any) -> None:
    _, _, trace = ran[0]
    assert overlapping(plan)
    assert overlapping(plan) <= on_lanes(trace)
    # Optimizer steps in fp64 have no price.
    compared = as_dict(compare(replace(plan, options=replace(plan.options, dtype="fp32")), trace))
    assert compared["makespan"]["predicted"] == plan.simulate().makespan
    assert compared["makespan"]["measured"] > 0
    assert {"F", "B", "O", "L"} <= compared["kinds"].keys()
