"""Scripts of the corpus, compared with the arguments that bash passes to the training command."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from debubble.imports.command_line import CommandLine
from debubble.imports.script_arguments import named_arguments
from debubble.imports.settings import MISSING_SOURCES, read_arguments

CORPUS = Path(__file__).parent / "corpus"
LAUNCHERS = ("megatron", "torchrun", "python", "python3", "deepspeed", "ray", "ssh", "pkill", "srun")
PRINT = '#!/bin/sh\nprintf "%s\\0" "$@" >> "$PRINTED"\nprintf "\\1" >> "$PRINTED"\n'
WITHIN_A_LAUNCHER = ("bloom_72_stages.slurm", "megatron_srun_bash.sh")
"""Scripts whose training command is one word of another shell's command."""
SCRIPTS: list[dict[str, Any]] = [
    form
    for form in tomllib.loads((CORPUS / "table.toml").read_text())["forms"]
    if "read" in form
    and form["framework"] == "megatron"
    and form["file"].endswith((".sh", ".slurm"))
    and form["file"] not in WITHIN_A_LAUNCHER
]


def started_by_bash(form: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Arguments of the longest command that bash starts."""
    line, printed = CommandLine.parse(form.get("args")), folder / "printed"
    for name in LAUNCHERS:
        (folder / name).write_text(PRINT)
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PRINTED": str(printed), "SAVE": "x", **line.variables}
    subprocess.run(
        ["bash", CORPUS / form["file"], *line.words], env=environment, cwd=folder, capture_output=True, check=False
    )
    runs = [named_arguments(run.split("\0")[:-1]) for run in printed.read_text().split("\1") if run]
    longest: dict[str, Any] = max(runs, key=len)
    return {**longest, **named_arguments(line.words)}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
@pytest.mark.parametrize("form", SCRIPTS, ids=[form["file"] for form in SCRIPTS])
def test_a_training_is_started_as_bash_starts_it(form: dict[str, Any], tmp_path: Path) -> None:
    line = CommandLine.parse(form["args"]) if "args" in form else None
    read = {
        name: value for name, value in read_arguments(CORPUS / form["file"], line).items() if name != MISSING_SOURCES
    }
    known = {name: value for name, value in read.items() if name.startswith("--") and "$" not in str(value)}

    started = started_by_bash(form, tmp_path)

    assert {name: started.get(name) for name in known} == known
    assert {name for name in started if name.startswith("--")} == {name for name in read if name.startswith("--")}
