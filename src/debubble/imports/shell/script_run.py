"""The result of interpreting a shell script: the commands that it starts, its variables and missing files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from debubble.imports.command_line import CommandLine
from debubble.imports.shell.words import is_known

SCRIPTS = (".sh", ".slurm", ".sbatch", ".pbs")
"""File name suffixes of scripts that start a job."""

TRAINING_ARGUMENTS = frozenset(
    (
        "--num-layers", "--hidden-size", "--micro-batch-size", "--global-batch-size", "--seq-length",
        "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-attention-heads", "--lr", "--bf16",
        "--yaml-cfg",
    )
)  # fmt: skip
"""Arguments that identify a command as a training."""
RANKS = ("NNODES", "NPROC_PER_NODE")
"""Environment variables that set the number of ranks of a command."""


@dataclass(frozen=True)
class StartedCommand:
    """A command that a script starts.

    Attributes:
        words: Its words.
        line: Its line.
        ranks: The variables of RANKS that are set for it.
        loop: The line and the head of the loop around it whose number of runs is unknown; empty: none.
    """

    words: tuple[str, ...]
    line: int
    ranks: Mapping[str, str] = field(default_factory=dict)
    loop: str = ""


@dataclass(frozen=True)
class StartedScript:
    """A script next to the interpreted one that it starts, with the environment and arguments that it gives it."""

    file: Path
    command_line: CommandLine


@dataclass(frozen=True)
class ScriptRun:
    """The commands, variables and missing files of an interpreted script.

    Attributes:
        commands: The commands that it starts.
        assigned: The words of every variable that it sets to a text with options (`--name`), in order.
        missing: Names of sourced scripts that do not exist.
        overwritten: Sentences on variables that the user gives and the script sets to another value.
        world_size: The product that it sets WORLD_SIZE to; None: not set, or unknown.
        files: Name -> text of the files that it writes by `cat`, `tee`, `echo` and `printf`.
        scripts: The scripts next to it that it starts.
    """

    commands: tuple[StartedCommand, ...]
    assigned: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    world_size: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    scripts: tuple[StartedScript, ...] = ()


def named_file(name: str, path: Path) -> Path | None:
    """The file that a script names, searched next to the script and in the two folders above; None: not found.

    Args:
        name: The file's name; unknown variables and leading folders that do not exist are ignored.
        path: The script.
    """
    components = [component for component in Path(name).parts if is_known(component) and component not in ("/", "..")]
    folders = (path.parent, *path.absolute().parents[1:3])
    candidates = (folder.joinpath(*components[start:]) for start in range(len(components)) for folder in folders)
    return next((file for file in candidates if file.is_file()), None)
