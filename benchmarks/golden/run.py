"""Runs cases of the golden corpus and records their answers."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import debubble.cli
from golden.cases import TARGETS, Case, PaperCase, PlanCase, PublishedCase

Answer = dict[str, Any]
"""`step`, `bound`, `peak`, the step of every planner that answered, and `hashes` of what must not change."""

VOLATILE = frozenset(("solve_seconds", "cut_off", "origin", "seconds", "files", "version"))
"""Entries that differ between runs of the same version."""


def answer_of(case: Case) -> Answer:
    """The answer of this version to a case."""
    match case:
        case PublishedCase():
            import published

            return {"step": published.predicted(published.RUNS[case.number])}
        case PaperCase():
            return {"hashes": {"reproduce": _digest(called("reproduce", case.paper, "--json"))}}
        case PlanCase():
            with TemporaryDirectory() as folder:
                return _planned(case, Path(folder))


def _planned(case: PlanCase, folder: Path) -> Answer:
    plan_file = folder / "plan.json"
    answer = called("plan", *case.write(folder), "--json", "-o", str(plan_file))
    hashes = {"plan --json": _digest(answer)}
    if case.fits is not None:
        hashes["fits"] = _digest(called("fits", *case.fits, "--json"))
    if not plan_file.exists():
        return {"error": answer.get("error", ""), "hashes": hashes}
    written = json.loads(plan_file.read_text())
    hashes["plan"] = _digest({key: written[key] for key in ("schedule", "partition", "costs")})
    hashes["simulate"] = _digest(called("simulate", str(plan_file), "--json"))
    for target in TARGETS if written.get("model") else TARGETS[:1]:
        hashes[f"export {target}"] = _digest(_exported(plan_file, target, folder / target))
    return {
        "step": answer["step_time"],
        "bound": answer["lower_bound"],
        "peak": max(answer["peak_memory"]),
        "planners": {c["planner"]: c["step_time"] for c in answer["candidates"] if c["step_time"]},
        "hashes": hashes,
    }


def _exported(plan_file: Path, target: str, folder: Path) -> dict[str, Any]:
    """Exported files and losses, or the refusal."""
    answer = called("export", str(plan_file), "--to", target, "-o", str(folder), "--json")
    written = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.exists() else []
    return answer | {str(file.relative_to(folder)): file.read_text() for file in written}


def called(*words: str) -> dict[str, Any]:
    """JSON that a call of `debubble` prints, without its progress."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = ["debubble", *words]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            debubble.cli.main()
    except SystemExit as end:
        if end.code not in (None, 0, 1, 2):
            raise
    finally:
        sys.argv = before
    answer: dict[str, Any] = json.loads(printed.getvalue() or "{}")
    return answer


def _digest(content: Any) -> str:
    text = json.dumps(_lasting(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _lasting(content: Any) -> Any:
    """The content without entries that differ between runs."""
    if isinstance(content, Mapping):
        return {key: _lasting(value) for key, value in content.items() if key not in VOLATILE}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [_lasting(value) for value in content]
    return content
