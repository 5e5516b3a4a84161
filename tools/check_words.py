"""Fails where a name of the package has a word that its readers would have to look up.

    python tools/check_words.py        (`make check` runs it)

Names are those of Megatron, torch, OR-Tools or the paper: see CONTRIBUTING.md.  A name that existed before this check
may stay where EXISTING lists it, until somebody finds a better one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

INSTEAD = {
    "behind": "after", "beside": "alongside, next to", "house": "package", "room": "capacity, free bytes",
    "deal": "assign", "deals": "assigns", "dealt": "assigned", "walk": "chain, run, traverse", "walks": "chains",
    "guests": "in flight", "patience": "timeout", "brake": "deadline", "ladder": "steps", "likeness": "scaled problem",
    "briefly": "a noun with a unit or role", "nearly": "a tolerance", "slowly": "a noun", "enough": "a minimum",
    "many": "a count", "cold": "a final temperature", "alike": "equal", "held": "kept, in flight",
}  # fmt: skip
"""Word in a name -> what to say instead."""
INSTEAD_ALONE = {
    "each": "the singular of the collection", "at": "index, position, time", "own": "local, rank, what it is",
    "part": "fraction, slice, component", "found": "result, match, plan", "kept": "saved_bytes, retained",
    "whole": "total, full, undivided", "least": "min_...", "most": "max_...", "left": "remaining",
    "again": "recompute, retry", "given": "config, specified", "others": "peers, rest", "what": "kind, quantity",
    "of": "from_..., ..._of_stage", "rooms": "capacities",
}  # fmt: skip
"""Word that is no name when it stands alone -> what to say instead."""
EXISTING = Path(__file__).with_name("existing_words.txt")


def names(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def words_of(name: str) -> set[str]:
    """The words of a name in snake case or camel case."""
    return set(re.sub("([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))


def occurrences(package: Path) -> Iterator[tuple[str, str, str]]:
    """The file, the name and the word of every name that has one of the words."""
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package).as_posix()
        for name in sorted(set(names(ast.parse(file.read_text())))):
            yield from ((place, name, word) for word in sorted(words_of(name) & INSTEAD.keys()))
            if name in INSTEAD_ALONE:
                yield place, name, name


def main() -> None:
    """Print every new name with such a word; exit 1 if there is one."""
    package = Path(__file__).parents[1] / "src" / "debubble"
    if sys.argv[1:] == ["--update"]:
        EXISTING.write_text(
            "".join(f"{place} {name}\n" for place, name in sorted({e[:2] for e in occurrences(package)}))
        )
        return
    existing = set(EXISTING.read_text().splitlines())
    new = [entry for entry in occurrences(package) if f"{entry[0]} {entry[1]}" not in existing]
    for place, name, word in new:
        print(f"src/debubble/{place}: '{name}' has the word '{word}'; better: {(INSTEAD | INSTEAD_ALONE)[word]}.")
    sys.exit(bool(new))


if __name__ == "__main__":
    main()
