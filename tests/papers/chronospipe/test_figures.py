import re
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import Kind
from debubble.papers.chronospipe.figures import evaluation
from debubble.papers.chronospipe.figures.memory_model import ALL, CHRONOS, HALF, INTERLEAVED, PLAIN, RECOMP
from debubble.papers.chronospipe.figures.messages import message_models
from debubble.papers.chronospipe.figures.scaling import hosted_chunks
from debubble.papers.registry import Table, papers, reproduced


def ours(table: Any) -> Any:
    """The cells of the column `ours`."""
    return table.column("ours")


@pytest.mark.parametrize(("method", "layers"), [(PLAIN, 40), (HALF, 64), (CHRONOS, 48), (RECOMP, 80), (ALL, 96)])
def test_largest_models_at_32_gb_are_those_of_the_paper(method: Any, layers: int) -> None:
    assert evaluation.largest_model(method) == layers


def test_methods_keep_their_fractions_of_the_activations() -> None:
    assert [m.activations(8) for m in (PLAIN, HALF, CHRONOS, RECOMP)] == [1, 1 / 2, 13 / 16, 5 / 16]
    assert INTERLEAVED.activations(8) == 1 + 7 / 16
    assert [ALL.states, RECOMP.states] == [pytest.approx(2 / 3), 1]


def test_the_note_has_throughputs_for_all_message_models() -> None:
    assert "99.3% with blocking messages, 114.4% where the receiver waits and 115.6%" in evaluation.savings_12().note


def test_throughput_of_all_moves_optimizer_states_to_the_host() -> None:
    run = ALL.run(8, 16)
    assert {Kind.D, Kind.S, Kind.P} <= {operation.op.kind for operation in run.operations}


def test_figure_10_savings_follow_from_the_fitted_layer() -> None:
    savings = dict(zip(evaluation.savings_10().column("method"), ours(evaluation.savings_10()), strict=True))
    assert savings["Megatron-Kwai"] == pytest.approx(1.27, abs=0.01)
    assert savings[RECOMP.name] == pytest.approx(1.72, abs=0.01)
    assert savings[ALL.name] == pytest.approx(2.22, abs=0.01)


def test_figure_12_is_close_to_the_papers_range() -> None:
    table = evaluation.savings_12()
    for recomp, everything in zip(table.column("Recomp"), table.column("ALL"), strict=True):
        assert 1.19 <= recomp <= 1.26
        assert 1.53 <= everything <= 1.58


def test_appendix_a_differs_from_its_text_at_six_sizes() -> None:
    table = reproduced(papers["chronospipe"].entry("Figure 6"), draw=False).tables[0]
    differing = [row[0] for row in table.rows if row[1] != row[2]]
    assert differing == [10, 12, 16, 27, 32, 36]


def test_figure_16_hosts_more_chunks_the_faster_the_host_is() -> None:
    assert [hosted_chunks(4, time) for time in (16, 24, 32, 64)] == [3, 2, 1, 0]


@pytest.mark.slow
def test_the_page_has_the_throughputs_per_message_model() -> None:
    page = (Path(__file__).parents[3] / "docs" / "notes" / "chronospipe.md").read_text()
    shown = re.findall(r"^\| \d+a?: .*?\|.*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    rows: Any = [row[-3:] for row in message_models().rows]
    assert all(blocking < receiver < asynchronous for blocking, receiver, asynchronous in rows)
    computed = [tuple(map(str, row)) for row in rows]
    assert set(shown) <= set(computed)
    assert len(shown) == 6


def table_of(place: str) -> Table:
    """The first table of an entry."""
    return reproduced(papers["chronospipe"].entry(place), draw=False).tables[0]


def test_figure_11_savings_at_pp4() -> None:
    assert ours(table_of("Figure 11")) == ["12.5%", "25%", "137.5%", "5.709%"]


def test_figure_15_with_four_chunks_and_25_percent_keeps_43_75() -> None:
    activations = {row[:2]: row[2] for row in table_of("Figure 15").rows}
    assert activations[4, "25%"] == "43.75%"
    assert activations[2, "50%"] == "25%"
    assert activations[3, "33.33%"] == "41.67%"
