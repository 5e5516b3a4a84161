"""Errors of predictions of published configurations, and the page of the docs that states them."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import published
import pytest
from published import BENCHMARK, RUNS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def predictions() -> list[float]:
    """The predicted seconds per step of every run."""
    return [published.predicted(run) for run in RUNS]


def test_the_median_errors_are_within_the_goals(predictions: list[float]) -> None:
    """The goals are 10% for dense models and 15% for mixtures of experts."""
    errors = defaultdict(list)
    for run, seconds in zip(RUNS, predictions, strict=True):
        errors[run.kind].append(abs(seconds / run.seconds - 1))
    assert {kind: len(values) for kind, values in errors.items()} == {"dense": 24, "MoE": 12}
    assert median(errors["dense"]) < 0.10
    assert median(errors["MoE"]) < 0.15


def test_the_docs_page_is_generated_from_the_results() -> None:
    page = published.page(BENCHMARK.rows())
    assert (ROOT / "docs/notes/published.md").read_text() == page, "python benchmarks/published.py --docs"


@pytest.mark.parametrize("page", ["README.md", "docs/costs.md"])
def test_pages_quote_the_errors_of_the_results(page: str) -> None:
    errors = re.findall(
        r"(?:dense|MoE) runs: the median error is (\S+), the worst (\S+);", published.page(BENCHMARK.rows())
    )

    for middle, worst in errors:
        assert f"median {middle}, worst {worst}" in (ROOT / page).read_text()
    assert len(errors) == 2


def test_the_results_are_up_to_date_with_the_cost_model(predictions: list[float]) -> None:
    rows = BENCHMARK.rows()
    stale = [i for i, seconds in enumerate(predictions) if rows[i]["predicted"] != pytest.approx(seconds, rel=1e-3)]
    assert not stale, f"python benchmarks/published.py {' '.join(map(str, stale))}"
