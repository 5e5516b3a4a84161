"""The GPU's benchmark, on a CPU with a tiny model: the same code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/gpu.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("gpu") / "gpu.json"
    given = ["--device", "cpu", "--tiny", "--repetitions", "2", "--output", str(output)]
    subprocess.run([sys.executable, str(BENCHMARK), *given], check=True, stdout=subprocess.PIPE)
    return json.loads(output.read_text())["models"]["tiny"]


def test_every_program_keeps_the_bytes_that_were_predicted_and_its_limit(tiny):
    peaks = {name: program["peak_activation_bytes"] for name, program in tiny["programs"].items()}
    assert peaks.keys() == {"kept", "recomputed", "offloaded"}
    assert peaks["kept"]["measured"] == peaks["kept"]["predicted"]
    assert peaks["recomputed"]["measured"] <= peaks["recomputed"]["predicted"] < peaks["kept"]["measured"]
    assert peaks["offloaded"]["measured"] <= peaks["offloaded"]["limit"] < peaks["kept"]["measured"]
    assert tiny["programs"]["offloaded"]["offloaded_bytes"] > 0


def test_a_blocks_and_the_links_times_are_measured(tiny):
    assert tiny["blocks"]["forward_flops_per_second"] > 0
    assert tiny["blocks"]["activation_bytes"] > 0
    assert tiny["host_link"]["bytes_per_second"] > 0
    assert {"F", "B", "O", "L"} <= tiny["programs"]["offloaded"]["kinds"].keys()
