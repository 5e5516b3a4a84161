"""What importing debubble costs and offers.  The direction of imports is held by the contracts of pyproject.toml."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import debubble as db


def test_importing_debubble_loads_neither_torch_nor_a_solver() -> None:
    heavy = {"torch", "ortools", "numba", "numpy", "matplotlib"}
    script = f"import sys, debubble; print(sorted({heavy} & {{*sys.modules}}))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_every_exported_name_can_be_reached() -> None:
    pytest.importorskip("torch")
    assert [name for name in db.__all__ if getattr(db, name) is None] == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_what_scripts_import_is_there(folder: str) -> None:
    pytest.importorskip("torch")
    missing = [
        f"{script.name}: {statement.module}.{alias.name}"
        for script in sorted((Path(__file__).parents[1] / folder).rglob("*.py"))
        for statement in ast.walk(ast.parse(script.read_text()))
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("debubble")
        for alias in statement.names
        if not _importable(str(statement.module), alias.name)
    ]
    assert missing == []


def _importable(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'magic'"):
        db.magic  # noqa: B018
