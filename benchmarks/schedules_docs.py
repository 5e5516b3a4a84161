"""Writes docs/schedules.md (the library, with a picture of each schedule) and docs/notes/schedules.md (the comparison).

Called by `python benchmarks/schedules.py docs`; the figures come from benchmarks/results/schedules.json.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import debubble as db
from debubble.views.picture import picture
from debubble.views.scene import Scene

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "schedules.md"
NOTE = ROOT / "docs" / "notes" / "schedules.md"
INTRODUCTION = Path(__file__).parent / "schedules_introduction.md"
ORIGINALS = Path(__file__).parent / "schedules_originals.md"
RESULTS = Path(__file__).parent / "results" / "schedules.json"
DEVICES, MICRO_BATCHES = 4, 8


def write() -> None:
    """The pages and the pictures."""
    for name in db.schedules:
        _picture_of(name).write_bytes(picture([example(name)], "png"))
    PAGE.write_text(page())
    NOTE.write_text(note())


def page() -> str:
    """The page of the library."""
    return "\n".join([INTRODUCTION.read_text(), library(), *map(section, sorted(db.schedules))])


def note() -> str:
    """The comparison with the authors' schedulers."""
    return "\n".join([ORIGINALS.read_text(), comparison()])


def library() -> str:
    """One row per schedule, from the registry."""
    lines = ["## The library", "", "| name | what | source | bubble | memory |", "| --- | --- | --- | --- | --- |"]
    for name, entry in sorted(db.schedules.items()):
        lines.append(f"| `{name}` | {entry.summary} | {entry.paper} | {entry.bubble} | {entry.memory} |")
    return "\n".join([*lines, ""])


def section(name: str) -> str:
    """A schedule's arguments and picture."""
    entry = db.schedules[name]
    options = sorted(entry.options - {"devices", "micro_batches", "costs"})
    lines = [f"### {name}", "", described(inspect.getdoc(entry.build) or ""), ""]
    if options:
        lines += [f"Options: {', '.join(f'`{o}=`' for o in options)}.", ""]
    return "\n".join([*lines, f"![{name}](pictures/{_picture_of(name).name})", ""])


def _picture_of(name: str) -> Path:
    return PICTURES / f"schedule-{name}.png"


def example(name: str) -> Scene:
    """A schedule at p = 4, m = 8, with all times 1."""
    entry = db.schedules[name]
    stages = DEVICES * entry.default_chunks
    costs = db.StageCosts.of(stages=stages, offload=0.5, activation=1 / entry.default_chunks)
    schedule = entry(devices=DEVICES, micro_batches=MICRO_BATCHES, costs=costs)
    return Scene(db.simulate(schedule, costs), title=name)


COMMON = (
    "devices: Pipeline devices, p.",
    "micro_batches: Micro-batches of a step, m.",
    "chunks: Stages per device, v.",
    "costs: Not read; the order is the same for any.",
    "costs: Times and bytes per stage; all times 1 by default.",
)
"""Arguments of most schedules, which the page names once."""


def described(docstring: str) -> str:
    """A Google docstring as Markdown: its sections' entries as lists, but for arguments that most schedules have."""
    lines: list[str] = []
    for line in docstring.splitlines():
        text = line.strip()
        if text in COMMON:
            continue
        if line in ("Args:", "Raises:"):
            lines += [f"{'Arguments' if line == 'Args:' else 'It raises'}:", ""]
        elif line.startswith("    ") and not line.startswith("     "):
            name, _, rest = text.partition(": ")
            lines.append(f"* `{name}`: {rest}")
        else:
            lines.append(f"  {text}" if line.startswith("     ") else line)
    return "\n".join(lines)


def comparison() -> str:
    """Ours beside the original's, cell by cell."""
    cells = json.loads(RESULTS.read_text())["rows"]
    found = {(c["row"], c["devices"], c["times"], c["objective"]): c for c in cells}
    rows = list(dict.fromkeys(c["row"] for c in cells))
    lines = [
        "| schedule | p | peak | uniform | its makespan | a | b |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for p in (4, 8, 16):
            shown = [_cell(found.get((row, p, times, "span")), "span") for times in ("uniform", "a", "b")]
            whole = _cell(found.get((row, p, "uniform", "makespan")), "makespan")
            peaks = [c["peak"] for c in cells if c["row"] == row and c["devices"] == p]
            if peaks:
                lines.append(f"| {row} | {p} | {max(peaks):g} | {shown[0]} | {whole} | {shown[1]} | {shown[2]} |")
    return "\n".join([*lines, ""])


def _cell(cell: dict[str, float] | None, objective: str) -> str:
    if cell is None:
        return ""
    ours = cell[f"{objective}_bubble"]
    worse = round(ours, 1) > cell["original"]
    return f"{ours:.1f} / {cell['original']:.1f}{' (worse)' if worse else ''}"


if __name__ == "__main__":
    write()
