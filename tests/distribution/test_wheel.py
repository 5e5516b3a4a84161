"""The wheel works without the source tree."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DEPENDENCIES = Path(np.__file__).parents[1]
"""Folder of the packages that debubble needs."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(call, check=True)
    (built,) = folder.glob("debubble-*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts of an environment with the wheel and this environment's dependencies."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=True)
    subprocess.run([place / "bin/pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{DEPENDENCIES}\n")
    return place / "bin"


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    files = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/debubble").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    assert files - inside == set()


@pytest.mark.slow
def test_an_installed_wheel_plans_and_draws(scripts: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [scripts / "python", "-c", "import debubble; print(debubble.__file__)"], cwd=tmp_path, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    call = ["plan", "llama-tiny", "--cluster", "2xA100-80GB", "--planner", "portfolio", "--effort", "0.5", "--json"]
    answer = subprocess.run(
        [scripts / "debubble", *call, "-o", "plan.json", "--html", "plan.html"], cwd=tmp_path, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip

    assert Path(where.strip()).is_relative_to(scripts.parent)
    assert json.loads(answer)["planner"] == "portfolio"
    assert "Does it fit?" in (tmp_path / "plan.html").read_text()
