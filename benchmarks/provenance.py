"""What a result file says of where its numbers come from: commit, versions, machine, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "ortools", "numba", "torch", "transformers")


def provenance() -> dict[str, Any]:
    """What describes this run, beside its commit."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
        "command": " ".join(["python", *sys.argv]),
    }


def measured_by() -> dict[str, Any]:
    """The commit and this run, as the first entries of a result file."""
    return {"commit": commit(), **provenance()}


def _version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The short name of the commit that is checked out, with a `+` if the sources differ from it."""
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if git("status", "--porcelain", "--", "src") else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
