"""ChronosPipe's figures come out as the oracles say; what is fitted predicts what is not."""

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


def table_of(place: str) -> Table:
    """The first table of an entry."""
    return reproduced(papers["chronospipe"].entry(place), draw=False).tables[0]


def ours(table: Any) -> Any:
    """The first column called `ours`."""
    return table.column("ours")


@pytest.mark.parametrize(("method", "layers"), [(PLAIN, 40), (HALF, 64), (CHRONOS, 48), (RECOMP, 80), (ALL, 96)])
def test_largest_models_at_32_gb_are_the_papers(method: Any, layers: int) -> None:
    assert evaluation.largest_model(method) == layers


def test_methods_hold_their_shares_of_the_activations() -> None:
    assert [m.activations(8) for m in (PLAIN, HALF, CHRONOS, RECOMP)] == [1, 1 / 2, 13 / 16, 5 / 16]
    assert INTERLEAVED.activations(8) == 1 + 7 / 16
    assert [ALL.states, RECOMP.states] == [pytest.approx(2 / 3), 1]


@pytest.fixture(scope="module")
def figure_9a() -> Table:
    return table_of("Figure 9a")


def test_figure_9a_predicts_the_papers_other_sizes(figure_9a: Table) -> None:
    sizes = dict(zip(figure_9a.column("method"), ours(figure_9a), strict=True))
    assert [sizes[method.name] for method in (CHRONOS, RECOMP, HALF)] == [17.18, 6.61, 10.57]
    ratios = dict(zip(figure_9a.column("method"), [row[-1] for row in figure_9a.rows], strict=True))
    assert ratios[ALL.name] == pytest.approx(0.646, abs=0.002)


@pytest.mark.parametrize("place", ["Figure 8"])
def test_tables_that_are_called_exact_have_the_papers_figures(place: str) -> None:
    table = table_of(place)
    assert table.basis == "exact"
    for at, name in enumerate(table.columns):
        if name.startswith("paper"):
            assert [row[at] for row in table.rows] == [row[at + 1] for row in table.rows]


def test_throughputs_are_said_for_messages_that_block_and_that_do_not(figure_9a: Table) -> None:
    said = "87.6% with blocking messages, 100.7% where the receiver waits and 101.3% with asynchronous ones"
    assert said in table_of("Figure 11").note
    assert "87.5% with blocking messages, 100.5% where the receiver waits and 101.4%" in figure_9a.note
    assert "99.3% with blocking messages, 114.4% where the receiver waits and 115.6%" in evaluation.savings_12().note
    assert "Ours is then 11.0 points with blocking messages, 0.3 where the receiver waits" in table_of("Figure 13").note


def test_throughputs_where_the_receiver_waits_lie_between_blocking_and_asynchronous_ones() -> None:
    rows: Any = message_models().rows
    for row in rows:
        blocking, receiver, asynchronous = row[-3:]
        assert blocking < receiver < asynchronous


def test_figure_1_has_the_papers_activations_and_states() -> None:
    for _, activations, our_activations, states, our_states, _, _ in table_of("Figure 1").rows:
        assert our_activations == activations
        assert our_states == pytest.approx(states, abs=0.01)


def test_throughput_of_all_moves_optimizer_states_to_the_host() -> None:
    run = ALL.run(8, 16)
    assert {Kind.D, Kind.S, Kind.P} <= {each.op.kind for each in run.operations}


def test_figure_10_savings_follow_from_the_fitted_layer() -> None:
    savings = dict(zip(evaluation.savings_10().column("method"), ours(evaluation.savings_10()), strict=True))
    assert savings["Megatron-Kwai"] == pytest.approx(1.27, abs=0.01)
    assert savings[RECOMP.name] == pytest.approx(1.72, abs=0.01)
    assert savings[ALL.name] == pytest.approx(2.22, abs=0.01)


def test_figure_11_savings_at_pp4() -> None:
    assert ours(table_of("Figure 11")) == ["12.5%", "25%", "137.5%", "5.709%"]


def test_figure_12_is_near_the_papers_range_without_fitting() -> None:
    table = evaluation.savings_12()
    for recomp, everything in zip(table.column("Recomp"), table.column("ALL"), strict=True):
        assert 1.19 <= recomp <= 1.26
        assert 1.53 <= everything <= 1.58


def test_figure_13_blocking_messages_match_the_formula() -> None:
    (plain, chronos, _, _) = table_of("Figure 13").rows
    assert plain[1:3] == (0.8959, 0.8959)
    assert chronos[1:3] == (0.8431, 0.8431)


def test_figure_14_overlap_doubles_with_the_pipeline() -> None:
    assert ours(table_of("Figure 14")) == ["45.45%", "90.9%", "91.8%", "100%"]


def test_figure_15_with_four_chunks_and_25_percent_keeps_43_75() -> None:
    kept = {row[:2]: row[2] for row in table_of("Figure 15").rows}
    assert kept[4, "25%"] == "43.75%"
    assert kept[2, "50%"] == "25%"
    assert kept[3, "33.33%"] == "41.67%"


def test_figure_16_idle_backwards() -> None:
    assert table_of("Figure 16").column("backwards") == [2, 3, 6]


def test_appendix_a_differs_from_its_text_where_equation_8_does() -> None:
    differing = [row[0] for row in table_of("Figure 6").rows if row[1] != row[2]]
    assert differing == [10, 12, 16, 27, 32, 36]


def test_figure_16_hosts_more_chunks_the_faster_the_host_is() -> None:
    assert [hosted_chunks(4, time) for time in (16, 24, 32, 64)] == [3, 2, 1, 0]


def test_the_page_has_the_throughputs_by_model_of_messages() -> None:
    page = (Path(__file__).parents[3] / "docs" / "notes" / "chronospipe.md").read_text()
    shown = re.findall(r"^\| \d+a?: .*?\|.*?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    computed = [tuple(str(share) for share in row[-3:]) for row in message_models().rows]
    assert set(shown) <= set(computed)
    assert len(shown) == 6
