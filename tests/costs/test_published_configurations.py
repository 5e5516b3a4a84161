"""Published configurations are predicted within the goals, and the page in the docs is that of the results."""

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
    """Seconds of a step of every run."""
    return [published.predicted(run) for run in RUNS]


def test_the_median_errors_are_within_the_goals(predictions: list[float]) -> None:
    """10% for dense models, 15% for mixtures."""
    errors = defaultdict(list)
    for run, seconds in zip(RUNS, predictions, strict=True):
        errors[run.kind].append(abs(seconds / run.seconds - 1))
    assert {kind: len(each) for kind, each in errors.items()} == {"dense": 24, "MoE": 12}
    assert median(errors["dense"]) < 0.10
    assert median(errors["MoE"]) < 0.15


def test_the_page_is_the_one_of_the_results() -> None:
    page = published.page(BENCHMARK.rows())
    assert (ROOT / "docs/notes/published.md").read_text() == page, "python benchmarks/published.py --docs"


@pytest.mark.parametrize("page", ["README.md", "docs/costs.md"])
def test_pages_that_people_read_quote_the_errors_of_the_results(page: str) -> None:
    found = re.findall(
        r"(?:dense|MoE) runs: the median error is (\S+), the worst (\S+);", published.page(BENCHMARK.rows())
    )

    for half, worst in found:
        assert f"median {half}, worst {worst}" in (ROOT / page).read_text()
    assert len(found) == 2


def test_the_results_have_the_predictions_of_these_costs(predictions: list[float]) -> None:
    rows = BENCHMARK.rows()
    stale = [i for i, seconds in enumerate(predictions) if rows[i]["predicted"] != pytest.approx(seconds, rel=1e-3)]
    assert not stale, f"python benchmarks/published.py {' '.join(map(str, stale))}"
