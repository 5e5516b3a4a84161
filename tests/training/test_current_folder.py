"""Files in the current folder with names of standard library modules are not imported."""

import json
import subprocess
from pathlib import Path

import pytest

from debubble.processes import PYTHON

DEBUBBLE = [*PYTHON, "-c", "import sys; from debubble.cli import main; sys.exit(main())"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of modules that fail and leave a file when imported."""
    for name in ("random", "queue", "types"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + ' ')\nraise ImportError('not the library')\n"
        )
    return tmp_path


@pytest.mark.slow
def test_searching_planners_ignore_a_local_random_module(folder: Path) -> None:
    (folder / "costs.json").write_text('{"stages": 2, "memory_limit": 2}')
    call = ["plan", "--costs", "costs.json", "--devices", "2", "--micro-batches", "4", "--effort", "0.1", "--json"]
    done = subprocess.run([*DEBUBBLE, *call], cwd=folder, capture_output=True, text=True, check=True)
    candidates = json.loads(done.stdout)["candidates"]
    assert [c for c in candidates if "failed" in (c.get("rejected") or "")] == []
    assert not (folder / "imported").exists()


def test_dataset_in_the_current_folder_is_imported_last(folder: Path) -> None:
    (folder / "mine.py").write_text("import random\ndef data(plan):\n    return [random.randrange(9)]\n")
    script = "from debubble.training.user_code import named_dataset; print(len(named_dataset('mine:data')(None)))"
    done = subprocess.run([*PYTHON, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
    assert not (folder / "imported").exists()
