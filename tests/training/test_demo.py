"""`make run`, the demo, in a fresh clone."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from debubble.training.demo import demo


def test_the_demo_makes_its_folder_and_runs_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "demo"
    is_folder: list[bool] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        is_folder.append(folder.is_dir())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    demo(output=folder)

    typed = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("$ debubble")]
    assert (typed, is_folder) == (["profile", "plan", "train"], [True] * 3)
