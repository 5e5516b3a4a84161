"""What `import debubble` loads and offers, and the shape of the package.  pyproject.toml has the import contracts."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import debubble as db
from debubble.planners.registry import ORDER


def test_importing_debubble_loads_neither_torch_nor_a_solver() -> None:
    heavy = {"torch", "ortools", "numba", "numpy", "matplotlib"}
    script = f"import sys, debubble; print(sorted({heavy} & {{*sys.modules}}))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_every_exported_name_can_be_reached() -> None:
    pytest.importorskip("torch")
    assert [name for name in db.__all__ if getattr(db, name) is None] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'magic'"):
        db.magic  # noqa: B018


def test_class_names_are_unique() -> None:
    package = Path(db.__file__).parent
    names = Counter(
        node.name
        for file in package.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in names.items() if number > 1] == []


def test_papers_have_the_same_files() -> None:
    folders = [file.parent for file in (Path(db.__file__).parent / "papers").glob("*/__init__.py")]
    assert {folder.name for folder in folders} == {"obscura", "optpipe", "scope", "chronospipe"}
    for folder in folders:
        assert {"planner.py", "paper.py", "figures"} <= {path.name for path in folder.iterdir()}


def test_the_planners_that_are_listed_first_are_there() -> None:
    assert tuple(db.planners)[: len(ORDER)] == ORDER


def test_ignored_lint_rules_name_files_that_exist() -> None:
    root = Path(__file__).parents[1]
    ignores = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    assert [pattern for pattern in ignores if not [*root.glob(pattern)]] == []
