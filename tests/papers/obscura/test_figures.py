"""The paper's claims against what the fitted models give (soft oracles, section 1)."""

from __future__ import annotations

import pytest

from debubble.papers.obscura.figures import evaluation as report
from debubble.papers.obscura.figures.fit import problem
from debubble.papers.obscura.figures.runs import as_printed, relaxed_full, speed_up
from debubble.papers.registry import Table, papers, reproduced
from debubble.simulator import simulate

CELLS = sorted(report.PAPER_12)


def table_of(place: str) -> Table:
    """The first table of an entry."""
    return reproduced(papers["obscura"].entry(place), draw=False).tables[0]


def distance(family: str, size: str, m: int) -> float:
    """How far the speed-up is outside of the range that the paper states."""
    low, *_, high = 2 * [float(figure) for figure in report.PAPER_12[family, size, m].split(" to ")]
    ours = speed_up(problem(family, size, m), as_printed)
    return max(low - ours, ours - high, 0.0)


@pytest.mark.parametrize(("family", "size", "m"), [cell for cell in CELLS if cell[2] == 16])
def test_speed_up_over_dapple_plus_is_the_papers(family: str, size: str, m: int) -> None:
    assert distance(family, size, m) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size", "m"), [cell for cell in CELLS if cell[2] != 16])
def test_speed_up_over_dapple_plus_is_the_papers_for_larger_batches(family: str, size: str, m: int) -> None:
    assert distance(family, size, m) <= 0.03


@pytest.mark.parametrize("m", [16, 64, 128])
def test_dependency_relaxation_alone_is_within_a_point(m: int) -> None:
    ours = speed_up(problem("Llama-2", "23B", m), relaxed_full)
    assert abs(ours - report.PAPER_16["dependency relaxation (DR)"][m]) <= 0.01


def test_figure_5_is_met_to_its_digits() -> None:
    assert all(abs(paper - ours) < 0.5 for _, paper, ours in table_of("Figure 5").rows)


@pytest.mark.parametrize(("size", "m", "ours"), [("18B", 32, 1.313), ("28B", 64, 1.225), ("23B", 128, 1.241)])
def test_figure_5s_messages_bring_figure_12_into_its_range(size: str, m: int, ours: float) -> None:
    assert speed_up(problem("Llama-2", size, m, messages=True), as_printed) == ours


def test_table_1_is_met_within_one_and_a_half_percent() -> None:
    for _, *cells in table_of("Table 1").rows:
        for paper, ours in zip(cells[::2], cells[1::2], strict=True):
            assert ours == pytest.approx(paper, rel=0.015)


def test_gpt_3_is_shown_with_the_fitted_and_the_computed_recompute_time() -> None:
    table = report.gpt_3()
    assert [(row[1], row[3], row[5]) for row in table.rows] == [(0.2, 1.305, 1.25), (0.305, 1.263, 1.21)]
    assert "by recompute time: fitted to 1.30: Obscura is; our cost model: neither is." in table.note


def test_a_recompute_time_that_gives_both_of_gpt_3s_speed_ups_is_named() -> None:
    assert report.gpt_3_sentence({"one": (1.31, 1.18), "other": (1.1, 1.17)}) == (
        "Within 2 points of the paper, by recompute time: one: both are; other: BPipe is."
    )


def test_figure_13_has_the_papers_stages() -> None:
    peaks = {name: values for name, *values, _ in table_of("Figure 13").rows}
    assert [s for s in range(8) if peaks["DAPPLE"][s] <= 80] == [6, 7]
    assert max(peaks["OHP-CMB"]) > 80
    assert max(peaks["BPipe"]) == pytest.approx(106, rel=0.03)
    assert max(peaks["BPipe, MLP"]) == pytest.approx(76, rel=0.03)
    assert all(peak == pytest.approx(80, rel=0.03) for peak in peaks["Obscura"][:5])
    assert peaks["Obscura"][5] == peaks["OHP-CMB"][5]
    assert peaks["Obscura"][6:] == peaks["DAPPLE"][6:]


def test_figure_14_is_met() -> None:
    rows = {(method, what): values for method, what, *values in table_of("Figure 14").rows}
    for what in ("computing", "bubble"):
        assert rows["DAPPLE+", what] == pytest.approx([4 / 3 * value for value in rows["DAPPLE", what]], abs=0.01)
    assert rows["DAPPLE+", "step"][0] == 4 / 3 * rows["DAPPLE", "step"][0]
    assert rows["Strawman", "bubble"][3] == 0
    assert rows["Obscura", "computing"][2] / rows["DAPPLE", "computing"][2] == pytest.approx(1.13, abs=0.005)
    assert rows["Obscura", "bubble"][2] > 2.9


def test_obscura_as_printed_is_within_the_limit() -> None:
    solution = as_printed(problem("Llama-2", "28B", 16))
    assert max(simulate(solution.schedule, solution.costs).peak_memory) <= 80


def test_dependency_relaxation_by_the_formula_is_what_is_simulated_without_the_cheap_operators() -> None:
    assert [round(report.relaxed_by_formula(m), 3) for m in (16, 64, 128)] == [1.278, 1.076, 1.038]
