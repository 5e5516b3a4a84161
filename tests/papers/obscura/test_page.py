"""The tables of docs/notes/obscura.md are what the planners find today.

8 A100-80GB with 72 GiB to use unless said, sequence length 4096, 32 micro-batches of 1; seconds of the pipeline's part
of a step, as predicted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from debubble.costs import Cluster
from debubble.costs.known_hardware import GIB, PCIE4
from debubble.ir import InfeasibleError, RunOptions
from debubble.models import models
from debubble.planners import planners
from debubble.planners.model_problem import problem_of

PAGE = (Path(__file__).parents[3] / "docs" / "notes" / "obscura.md").read_text()
MODELS = {
    "Llama-2 18B": "llama2-18b",
    "Llama-2 23B": "llama2-23b",
    "Llama-2 28B": "llama2-28b",
    "GPT-3 28B": "gpt3-28b",
}
PLANNERS = ("dapple", "dapple+", "ohp-cmb", "bpipe", "obscura")
LINKS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Shares of the built-in bandwidth."""


def seconds(planner: str, model: str, *, limit: float = 72, link: float = 1.0) -> str:
    cluster = Cluster.from_dict(
        {"devices": "8xA100-80GB", "memory_limit": limit * GIB, "host_bandwidth": PCIE4 * (link or 1)}
    )
    problem = problem_of(models[model], cluster, RunOptions(sequence_length=4096), micro_batches=32)
    try:
        result = planners[planner](problem.swapping("host" if link else "none"))
    except InfeasibleError:
        return "does not fit"
    return f"{float(problem.time_of(result.timeline)):.2f}"


def cells_of(row: str) -> list[str]:
    """The cells of the first row of the page that begins so."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    return line.strip("| ").split(" | ")[1:]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_planners_take_what_the_page_says(model: str) -> None:
    assert [seconds(name, MODELS[model]) for name in PLANNERS] == cells_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [56, 60, 64, 68, 72])
def test_memory_and_the_host_link_are_worth_what_the_page_says(limit: int) -> None:
    assert [seconds("obscura", "llama2-23b", limit=limit, link=link) for link in LINKS] == cells_of(f"{limit} GiB")
