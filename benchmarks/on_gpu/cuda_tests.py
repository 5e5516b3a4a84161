"""`pytest -m cuda`; in a dry run, some of the same tests on the CPU."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from on_gpu.figures import Figures
from on_gpu.settings import Settings

ROOT = Path(__file__).parents[2]


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    report = figures.folder / "tests.xml"
    chosen = ["tests/cuda/test_lanes.py"] if settings.dry else ["tests/cuda", "-m", "cuda"]
    command = [
        sys.executable, "-m", "pytest", *chosen, "-q", "-p", "no:cacheprovider", "-n", "6", "--dist", "worksteal",
        "--timeout", "30", "-W", "default",
        f"--junit-xml={report}",
    ]  # fmt: skip
    try:
        subprocess.run(command, cwd=ROOT, timeout=max(1.0, figures.remaining_seconds - 3))
    except subprocess.TimeoutExpired:
        figures.add("ended", figures="the tests took too long: how they ended is in the log")
        return
    cases = list(ElementTree.parse(report).iter("testcase"))
    report.unlink()
    failed = {name_of(case): text[-2000:] for case in cases for text in failures(case)}
    skipped = sum(case.find("skipped") is not None for case in cases)
    figures.add("passed", figures=len(cases) - len(failed) - skipped)
    figures.add("skipped", figures=skipped)
    figures.add("failed", figures=failed)


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def failures(case: ElementTree.Element) -> list[str]:
    return [element.text or "" for kind in ("failure", "error") for element in case.findall(kind)]
