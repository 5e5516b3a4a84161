"""The tables of docs/notes/long-runs.md on long runs, from `benchmarks/results/long_run.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "long_run.json"


def table() -> str:
    """One row for every part of every run."""
    lines = [
        "| model | layout of the four ranks | steps | ended, as | other orders |",
        "| --- | --- | --- | --- | --- |",
    ]
    cases = json.loads(RESULTS.read_text())["cases"]
    lines += [_row(name, case, part) for name, case in cases.items() for part in case["parts"]]
    lines += [
        "",
        "| model | parameters | loss | validation | row by row | first steps | run to fp64 | one process to fp64 |",
    ]
    lines += [
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_differences(name, case) for name, case in cases.items()),
    ]
    return "\n".join(lines)


def _row(name: str, case: dict[str, Any], part: dict[str, Any]) -> str:
    layout = " x ".join(
        f"{degree} {size}" if degree != "zero" else f"ZeRO-{size}" for degree, size in part["layout"].items()
    )
    switches = [switch for switch in part["switches"] if not switch.endswith("search")]
    steps = f"{part['resumed_from'] + 1} to {part['ended_at']} of {case['steps']}"
    return f"| {name} | {layout} | {steps} | {part['end']} | {', '.join(switches) or 'none'} |"


def _differences(name: str, case: dict[str, Any]) -> str:
    fp64 = case["fp64"]
    against_reference = [case["loss"], case["validation"], case["rounding"]["control"]]
    against_fp64 = [fp64["loss"], fp64["reference"]]
    cells = [
        name, f"{case['parameters'] / 1e6:.1f} million", *map(_relative, against_reference), str(fp64["steps"]),
        *map(_relative, against_fp64),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _relative(difference: dict[str, Any]) -> str:
    return f"{difference['relative']:.1e}"


if __name__ == "__main__":
    print(table())
