"""The benchmark of long runs with tiny models: through kills, other layouts and other orders, beside one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tensorboard")

BENCHMARK = Path(__file__).parents[2] / "benchmarks/long_run.py"
ROUNDING = 2e-6
"""Relative difference of fp32 losses to which rounding alone leads the tiny models."""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama-100m", "mixtral-8-experts"])
def test_losses_are_those_of_one_process_through_kills_layouts_and_orders(case: str, tmp_path: Path) -> None:
    given = ["--size", "tiny", "--case", case, "--folder", str(tmp_path), "--output", str(tmp_path / "result.json")]
    subprocess.run([sys.executable, str(BENCHMARK), *given], check=True, stdout=subprocess.PIPE)
    result = json.loads((tmp_path / "result.json").read_text())["cases"][case]
    parts = result["parts"]
    assert [part["end"] for part in parts] == ["a rank was killed", "the launcher was killed", "all steps were done"]
    assert 0 == parts[0]["resumed_from"] < parts[1]["resumed_from"] < parts[2]["resumed_from"]
    assert any(switch.endswith("adopted") for part in parts for switch in part["switches"])
    assert len(result["losses"]) == result["steps"]
    assert result["loss"]["relative"] < ROUNDING
    assert result["validation"]["relative"] < ROUNDING
