from pathlib import Path

import pytest

from debubble.ir import StageCosts
from debubble.papers.optpipe.figures.program import reductions
from debubble.papers.optpipe.figures.runs import BASELINES, METHODS, Setting, attempt, samples_needed, searched
from debubble.papers.optpipe.figures.tables import (
    PRINTED,
    Row,
    advantage,
    capacity,
    micro_batch_scaling,
    printed_losses,
    rich_and_limited,
    row,
    toy,
    toy_table,
)
from debubble.schedules import schedules
from debubble.simulator import Timeline, simulate

SMALL = [Setting(4, "1.5B", 8, size) for size in (4, 32)]
UNEXPLAINED = {(4, "1.5B", 16, 16, "ZB-V"), (4, "3.6B", 16, 8, "ZB")}
"""Cells that cannot run out of memory: with 8 micro-batches they fit in the paper, and fewer reach their peak."""


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "model"), [(4, "1.5B"), (4, "3.6B"), (8, "7.1B"), (16, "14.2B")])
def test_baselines_run_out_of_memory_as_in_the_paper(devices: int, model: str) -> None:
    group = [s for s in PRINTED if (s.devices, s.model) == (devices, model)]
    different = {
        (s.devices, s.model, s.micro_batches, s.size, method)
        for s in group
        for method in BASELINES
        if (samples_needed(s, method) > capacity(devices, model)) != (PRINTED[s][method] is None)
    }
    assert different == {cell for cell in UNEXPLAINED if cell[:2] == (devices, model)}


@pytest.mark.parametrize("method", BASELINES)
def test_samples_of_a_baseline_are_its_simulated_peak(method: str) -> None:
    setting = SMALL[0]
    schedule, costs = setting.schedule(method)
    peaks = simulate(schedule, costs).peak_memory
    peak_bytes = max(float(peak - costs.static_of(d)) for d, peak in enumerate(peaks))
    samples = peak_bytes / (float(sum(costs.activation)) / setting.devices) * setting.size
    assert samples_needed(setting, method) == pytest.approx(samples)


@pytest.mark.parametrize(
    "setting", [SMALL[0], pytest.param(SMALL[1], marks=pytest.mark.slow)], ids=lambda s: f"size {s.size}"
)
def test_optpipe_is_never_slower_than_baselines_that_fit(setting: Setting) -> None:
    result = row(setting)
    assert {m: result.ours[m] is None for m in METHODS} == {m: result.printed[m] is None for m in METHODS}
    assert result.ours["OptPipe"] == min(time for time in result.ours.values() if time is not None)
    tuned, printed = result.ours["PipeOffload"], result.ours["PipeOffload as printed"]
    assert tuned is None or printed is None or tuned < printed


@pytest.mark.slow
def test_plans_of_optpipe_fit_the_memory() -> None:
    setting = SMALL[-1]
    timeline = searched(setting, capacity(4, "1.5B"))
    assert timeline is not None
    limit = timeline.program.costs.memory_limit
    assert limit is not None
    assert all(peak <= allowed for peak, allowed in zip(timeline.peak_memory, limit, strict=True))
    assert attempt(setting, "1F1B", capacity(4, "1.5B")) is None


@pytest.mark.slow
def test_idle_time_of_figure_4_is_halved_against_adaoffload() -> None:
    toys = {4: toy(4)}
    assert {name: timeline.makespan for name, timeline in toys[4].items()} == {
        "PipeOffload as printed": 21,
        "AdaOffload as printed": 18,
        "PipeOffload": 15,
        "AdaOffload": 15,
        "zb limited": 18,
        "OptPipe, optimal": 15,
        "V-shape limited": 14.5,
        "OptPipe in a V, optimal": 13.5,
    }
    table = toy_table(toys)
    assert "50% against AdaOffload as printed, 0% against PipeOffload, 0% against AdaOffload" in table.note
    assert "40% against V-shape limited, there with two stages" in table.note
    assert table.basis == "exact"


def timed(setting: Setting, **spans: int) -> Row:
    """A row whose methods take these spans in ms, with the memory of one activation."""

    def taking(span: int) -> Timeline:
        costs = StageCosts.of(stages=1, forward=span / 3000, backward_input=span / 3000, backward_weight=span / 3000)
        return simulate(schedules["1f1b"](devices=1, micro_batches=1), costs)

    return Row(setting, {}, {name.replace("_", " "): taking(span) for name, span in spans.items()})


def test_the_title_counts_rows_with_a_faster_baseline() -> None:
    rows = (
        timed(SMALL[0], OptPipe=100, PipeOffload=110, zb_limited=90),
        timed(SMALL[1], OptPipe=100, PipeOffload=125, zb_limited=100),
    )
    table = advantage(rows)
    assert "slower than zb limited in 1 of 2 rows" in table.title
    assert "saves -11.1 to 0%, on average -5.5%, and nothing in 1 rows" in table.note
    assert [row[-3:-1] for row in table.rows] == [("zb limited", -11.1), ("zb limited", 0.0)]


def test_the_table_of_the_paper_contradicts_its_text() -> None:
    rows = tuple(Row(setting, printed, {}) for setting, printed in PRINTED.items())
    losses = printed_losses(rows)
    assert (len(losses), round(max(losses), 1)) == (20, 29.1)
    assert sum(loss > 2 for loss in printed_losses(rich_and_limited(rows)[0])) == 16


def test_the_table_marks_plans_that_exceed_the_device() -> None:
    costs = StageCosts.of(stages=1, activation=183 * 2**30)
    timeline = simulate(schedules["1f1b"](devices=1, micro_batches=1), costs)
    table = advantage((Row(SMALL[0], {}, {"OptPipe": timeline, "PipeOffload": timeline}),))
    assert table.rows[0][-1] == "183.0, the capacity is fitted and the device has 80"
    assert "in 1 rows the plan needs more memory" in table.note


def test_figure_6_has_savings_against_the_fastest_baseline() -> None:
    spans = {"OptPipe": 100, "PipeOffload": 120, "AdaOffload": 120, "PipeOffload_as_printed": 150}
    rows = tuple(timed(Setting(8, "7.1B", m, 8), zb_limited=zb, **spans) for m, zb in ((16, 105), (32, 100)))
    table = micro_batch_scaling(rows)
    assert [row[9:11] for row in table.rows] == [(16.7, 4.8), (16.7, 0.0)]
    assert "ours against it as printed is 33.3% there and 33.3% over all rows" in table.note
    assert "against the fastest baseline, zb limited, OptPipe saves 0 to 4.8%." in table.note


@pytest.mark.slow
def test_the_page_has_the_sizes_of_the_reduced_programs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "notes" / "optpipe.md").read_text()
    for sizes in reductions().rows:
        cells = " | ".join(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in sizes)
        assert f"| {cells} |" in page
