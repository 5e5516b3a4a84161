"""What is said of the accuracy of predictions is what the measured runs show."""

from __future__ import annotations

import pytest
from measured.__main__ import BENCHMARK, row_of, summary

from debubble.costs.accuracy import MEMORY, STEP, Accuracy

ROWS = {row["case"]: row for row in BENCHMARK.rows()}


@pytest.mark.parametrize(("what", "said"), [("step", STEP), ("memory", MEMORY)])
def test_the_stated_errors_are_those_of_the_results(what: str, said: Accuracy) -> None:
    errors = [row[f"{what}_error"] for row in ROWS.values() if f"{what}_error" in row]
    found = summary(errors)
    assert said == Accuracy(runs=int(found["runs"]), half=round(found["half"], 3), most=round(found["most"], 3))


@pytest.mark.parametrize("case", [*BENCHMARK.cases][::6])
def test_the_results_are_the_predictions_of_these_costs(case: str) -> None:
    for name, value in row_of(BENCHMARK.cases[case]).items():
        assert ROWS[case][name] == (pytest.approx(value) if isinstance(value, float) else value)
