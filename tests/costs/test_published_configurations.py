"""Published configurations are predicted within the goals, and the page in the docs is that of the results."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import published
import pytest
from published_runs import RUNS

ROOT = Path(__file__).parents[2]


def test_the_median_errors_are_within_10_percent_for_dense_models_and_15_for_mixtures() -> None:
    errors = defaultdict(list)
    for run in RUNS:
        errors[run.kind].append(abs(published.predicted(run) / run.seconds - 1))
    assert {kind: len(each) for kind, each in errors.items()} == {"dense": 24, "MoE": 12}
    assert median(errors["dense"]) < 0.10
    assert median(errors["MoE"]) < 0.15


def test_the_page_is_the_one_of_the_results() -> None:
    rows = json.loads((ROOT / "benchmarks/results/published.json").read_text())["rows"]
    page = published.page([rows[str(number)] for number in range(len(RUNS))])
    assert (ROOT / "docs/notes/published.md").read_text() == page, "python benchmarks/published.py docs"


def test_the_results_have_the_predictions_of_these_costs() -> None:
    rows = json.loads((ROOT / "benchmarks/results/published.json").read_text())["rows"]
    stale = [number for number, run in enumerate(RUNS)
             if rows[str(number)]["predicted"] != pytest.approx(published.predicted(run), rel=1e-3)]  # fmt: skip
    assert not stale, f"python benchmarks/published.py --only {' '.join(map(str, stale))}"
