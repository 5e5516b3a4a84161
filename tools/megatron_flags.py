"""Writes the names of all past and present arguments of Megatron-LM's parsers, for the importer's remarks.

    python tools/megatron_flags.py MEGATRON-LM

MEGATRON-LM is a git directory of NVIDIA/Megatron-LM with its history.  Names are from the parsers of all commits, and
from the fields of the configurations that the newest parser is made of; nothing of the files is run.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

FLAGS = Path(__file__).parents[1] / "src/debubble/frameworks/megatron/flags.txt"
PARSERS = ("arguments.py", "megatron/arguments.py", "megatron/training/arguments.py")
CONFIGURATIONS = "^class \\w*Config\\b"
NAME = re.compile(r"""['"]--([A-Za-z][\w-]*)['"]""")


def git(folder: str, *words: str) -> str:
    """Output of git."""
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True).stdout.decode(
        errors="replace"
    )


def names(folder: str) -> Iterator[str]:
    """The names without leading dashes."""
    added = re.findall(r"^\+.*", git(folder, "log", "-p", "--format=", "HEAD", "--", *PARSERS), re.MULTILINE)
    yield from NAME.findall("\n".join(added))
    yield from NAME.findall(git(folder, "grep", "-h", "-A1", "add_argument(", "HEAD", "--", "*.py"))
    for file in git(folder, "grep", "-l", "-E", CONFIGURATIONS, "HEAD", "--", "megatron/*.py").split():
        text = git(folder, "show", file)
        yield from NAME.findall(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                switch = ast.unparse(node.annotation) == "bool"
                yield from (f"{prefix}{node.target.id}" for prefix in ("", *("no-", "disable-") * switch))


def main() -> None:
    """Write the file."""
    known = sorted({name.replace("_", "-") for name in names(sys.argv[1])})
    FLAGS.write_text(textwrap.fill(" ".join(known), width=120, break_on_hyphens=False) + "\n")


if __name__ == "__main__":
    main()
