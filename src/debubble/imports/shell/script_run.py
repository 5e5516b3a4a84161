"""What a shell script was found to do: the commands that it starts, its variables, and the files that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from debubble.imports.shell.words import is_known

TRAINING_ARGUMENTS = frozenset(
    (
        "--num-layers", "--hidden-size", "--micro-batch-size", "--global-batch-size", "--seq-length",
        "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-attention-heads", "--lr", "--bf16",
    )
)  # fmt: skip
"""Arguments by which a command is known to train."""
RANKS = ("NNODES", "NPROC_PER_NODE")
"""Variables of the environment by which a command starts that many ranks."""


@dataclass(frozen=True)
class Started:
    """A command that a script starts: its words, its line, and those of RANKS that are set for it."""

    words: tuple[str, ...]
    line: int
    ranks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScriptRun:
    """The variables, commands and files of a script that was followed.

    Attributes:
        commands: Its commands.
        assigned: The words of every variable that it sets to something with `--` in it, in order.
        missing: The scripts that it sources and that are not there.
        overwritten: The variables that it is given and sets otherwise, in words.
        world_size: The product that it sets WORLD_SIZE to; None: it does not, or cannot be followed there.
    """

    commands: tuple[Started, ...]
    assigned: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    world_size: str | None = None


def named_file(name: str, path: Path) -> Path | None:
    """The file that a script names, where it lies next to the script or in a folder above; None: it does not.

    Args:
        name: The file's name, of which unknown variables and folders that are not there are left out.
        path: The script.
    """
    parts = [part for part in Path(name).parts if is_known(part) and part not in ("/", "..")]
    folders = (path.parent, *path.absolute().parents[1:3])
    places = (folder.joinpath(*parts[begin:]) for begin in range(len(parts)) for folder in folders)
    return next((each for each in places if each.is_file()), None)
