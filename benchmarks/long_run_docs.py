"""The tables of docs/runtime.md on long runs, from `benchmarks/results/long_run.json`."""

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
        "| model | parameters | loss | validation | first steps | loss in these | by rounding alone in these |",
    ]
    lines += [
        "| --- | --- | --- | --- | --- | --- | --- |",
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
    found = [f"{case[what]['relative']:.1e}" for what in ("loss", "validation")]
    rounding = case["rounding"]
    alone = f"{rounding['steps']} | {rounding['loss']['relative']:.1e} | {rounding['control']['relative']:.1e}"
    return f"| {name} | {case['parameters'] / 1e6:.1f} million | {' | '.join(found)} | {alone} |"


if __name__ == "__main__":
    print(table())
