"""Obscura and its baselines, and the worth of memory and of the host link: the tables of docs/notes/obscura.md.

    python benchmarks/obscura_sweep.py [--docs]

8 A100-80GB with 72 GiB to use unless said, sequence length 4096, 32 micro-batches of 1; seconds of the pipeline's part
of a step, as predicted.  With --docs the tables are written into the page.  Every run gives the same digits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from debubble.costs import Cluster
from debubble.costs.known_hardware import GIB, PCIE4
from debubble.ir import InfeasibleError, RunOptions
from debubble.models import models
from debubble.planners import planners
from debubble.planners.model_problem import problem_of

MODELS = {
    "Llama-2 18B": "llama2-18b",
    "Llama-2 23B": "llama2-23b",
    "Llama-2 28B": "llama2-28b",
    "GPT-3 28B": "gpt3-28b",
}
PLANNERS = ("dapple", "dapple+", "ohp-cmb", "bpipe", "obscura")
LIMITS = (56, 60, 64, 68, 72)
LINKS = {"no host": 0.0, "a quarter": 0.25, "half": 0.5, "built in": 1.0, "double": 2.0}
PAGE = Path(__file__).parents[1] / "docs" / "notes" / "obscura.md"


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


def baselines() -> list[str]:
    """Every planner on every model."""
    head = ["model", *(f"`{name}`" for name in PLANNERS)]
    return _table(head, MODELS, lambda model: [seconds(name, MODELS[model]) for name in PLANNERS])


def sweep() -> list[str]:
    """Limits and shares of the built-in bandwidth, for 23B."""
    rows = {f"{limit} GiB": limit for limit in LIMITS}
    return _table(
        ["limit", *LINKS],
        rows,
        lambda name: [seconds("obscura", "llama2-23b", limit=rows[name], link=link) for link in LINKS.values()],
    )


def _table(head: list[str], rows: Mapping[str, object], cells: Callable[[str], list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *([name, *cells(name)] for name in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/notes/obscura.md")
    arguments = parser.parse_args()
    for make in (baselines, sweep):
        table = make()
        print(*table, sep="\n", flush=True)
        if arguments.docs:
            lines = PAGE.read_text().splitlines()
            begin = lines.index(table[0])
            end = next(at for at in range(begin, len(lines)) if not lines[at].startswith("|"))
            PAGE.write_text("\n".join([*lines[:begin], *table, *lines[end:]]) + "\n")


if __name__ == "__main__":
    main()
