"""The architecture, checked: imports run one way, and `import debubble` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import debubble as db

SOURCE = Path(db.__file__).parent
FLOORS = (
    "ir", "costs", "simulator", "solver", "schedules", "planners", "runtime", "profiler", "views", "exports",
    "reproduce", "training", "cli",
)  # fmt: skip
TORCH = ("runtime", "profiler", "training")


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def floors_of(file: Path) -> set[str]:
    parts = [name.split(".") for name in imports(file)]
    return {part[1] for part in parts if part[0] == "debubble" and len(part) > 1 and part[1] in FLOORS}


def files_of(floor: str) -> list[Path]:
    return sorted((SOURCE / floor).rglob("*.py"))


def test_every_folder_is_a_floor_of_the_house() -> None:
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert folders == set(FLOORS)


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_only_from_a_lower_floor_to_a_higher_one(floor: str) -> None:
    allowed = set(FLOORS[: FLOORS.index(floor) + 1])
    assert {str(f.relative_to(SOURCE)): floors_of(f) - allowed for f in files_of(floor) if floors_of(f) - allowed} == {}


def test_the_runtime_uses_the_ir_and_the_simulator_alone() -> None:
    assert set().union(*(floors_of(f) for f in files_of("runtime"))) == {"ir", "simulator", "runtime"}


@pytest.mark.parametrize("floor", [f for f in FLOORS if f not in (*TORCH, "cli")])
def test_planning_never_imports_torch(floor: str) -> None:
    assert [f for f in files_of(floor) if any(name.split(".")[0] == "torch" for name in imports(f))] == []


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
