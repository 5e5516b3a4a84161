"""The cases of the golden corpus: calls of `debubble`, and published runs.

Calls go through the command line, so that no move inside the package changes them; `calls.json` has them.  Random
problems were drawn once, under memory limits that bind in most.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debubble.exports import exports

NEVER = ("--deadline", "3600")
"""A deadline that no search reaches, so that answers depend only on the effort."""
FASTEST = (*NEVER, "--fastest")
"""Searches of degrees are judged by the fastest plan, not by the simpler recommended one."""
EFFORT = 0.5
"""Effort of all cases except for the settings and the searches of degrees."""
CALLS = json.loads(Path(__file__).with_name("calls.json").read_text())
TARGETS = tuple(exports)


@dataclass(frozen=True)
class PlanCase:
    """A call of `debubble plan`, and what is read from its plan file."""

    name: str
    words: tuple[str, ...]
    files: dict[str, Any] = field(default_factory=dict)
    """JSON files that the call reads, by name."""
    fits: tuple[str, ...] | None = None
    """Words of `debubble fits` for the same run."""
    is_setting: bool = False
    """Whether its gap to the bound may not grow by more than a point."""

    def write(self, folder: Path) -> tuple[str, ...]:
        """Write the files, and return the call's words with their paths."""
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return tuple(str(folder / word) if word in self.files else word for word in self.words)


@dataclass(frozen=True)
class PublishedCase:
    """A published run whose step is predicted."""

    name: str
    number: int
    """Index in `cases/published.json`."""


@dataclass(frozen=True)
class PaperCase:
    """Tables and figures of a paper, by `debubble reproduce`."""

    name: str
    paper: str


Case = PlanCase | PublishedCase | PaperCase


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _settings()
    yield from (PublishedCase(f"published-{number}", number) for number in range(0, 36, 2))
    yield from (PaperCase(f"paper-{name}", name) for name in ("chronospipe",))
    yield from _models()
    yield from _problems()


def _settings() -> Iterator[PlanCase]:
    """The settings of docs/joint.md, with default options."""
    for name, words in CALLS["settings"].items():
        yield PlanCase(name, (*words.split(), *NEVER), is_setting=True)


def _models() -> Iterator[PlanCase]:
    """Ordinary jobs, each with a different lever, degree or target."""
    for words in CALLS["models"]:
        model, *rest = words.split()
        name = "-".join((model, *(word.lstrip("-") for word in rest if not word.startswith("--micro"))))
        run = [word for word in rest if word not in ("--planner", "--swap", "--for", "--chunks")]
        # The corpus tests searches, whatever a framework's kernels are measured to cost.
        priced = ("--framework", "target") if "--for" in rest else ()
        search = FASTEST if "--global-batch" in rest else ("--effort", str(EFFORT), *NEVER)
        fits = (model, *rest) if len(run) == len(rest) else None
        yield PlanCase(f"model-{name}"[:70], (model, *rest, *priced, *search), fits=fits)


def _problems() -> Iterator[PlanCase]:
    """Random costs of stages, with two chunks in every other problem, and random units with a free partition."""
    for name, entry in CALLS["problems"].items():
        files = {file: content for file, content in entry.items() if file != "words"}
        yield PlanCase(name, (*entry["words"].split(), "--effort", str(EFFORT), *NEVER), files)
