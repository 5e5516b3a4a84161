"""What is said of the accuracy of predictions is what the measured runs show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from measured.__main__ import RUNS, row_of, summary

from debubble.costs.accuracy import MEMORY, STEP, Accuracy

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, Any] = json.loads((ROOT / "benchmarks/results/measured.json").read_text())


@pytest.mark.parametrize(("what", "said"), [("step", STEP), ("memory", MEMORY)])
def test_the_stated_errors_are_those_of_the_results(what: str, said: Accuracy) -> None:
    errors = [row[f"{what}_error"] for row in RESULTS["rows"] if f"{what}_error" in row]
    found = summary(errors)
    assert said == Accuracy(runs=int(found["runs"]), half=round(found["half"], 3), most=round(found["most"], 3))


@pytest.mark.parametrize("number", range(0, 49, 6))
def test_the_results_are_the_predictions_of_these_costs(number: int) -> None:
    run = json.loads(RUNS.read_text())[number]
    before, now = RESULTS["rows"][number], row_of(run)
    assert now == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in before.items()}
