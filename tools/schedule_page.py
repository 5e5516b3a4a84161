"""Writes docs/schedules.md, the schedule library with pictures: `python tools/schedule_page.py`.

A picture that is there stays: delete it to draw it again.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import debubble as db
from debubble.views.picture import picture
from debubble.views.scene import Scene

DOCS = Path(__file__).parents[1] / "docs"
COMMON = (
    "devices: Pipeline devices, p.",
    "micro_batches: Micro-batches of a step, m.",
    "chunks: Stages per device, v.",
    "costs: Not read; the order is the same for any.",
    "costs: Times and bytes per stage; all times 1 by default.",
    "recomputing: Stages whose backwards recompute.",
)
"""Arguments that many schedules share, which the introduction explains once."""


def page() -> str:
    """The page: introduction, one row per schedule of the registry, and their sections."""
    lines = ["## The library", "", "| name | what | source | bubble | memory |", "| --- | --- | --- | --- | --- |"]
    for name, entry in sorted(db.schedules.items()):
        lines.append(f"| `{name}` | {entry.summary} | {entry.paper} | {entry.bubble} | {entry.memory} |")
    introduction = Path(__file__).with_suffix(".md").read_text()
    return "\n".join([introduction, *lines, "", *map(section, sorted(db.schedules))])


def section(name: str) -> str:
    """A schedule's arguments and picture; the table has its summary, the introduction the shared arguments."""
    entry = db.schedules[name]
    _, _, further = (inspect.getdoc(entry.build) or "").partition("\n\n")
    words = described(further)
    options = sorted(entry.options - {"devices", "micro_batches", "costs"})
    shared = [option for option in options if f"* `{option}`:" not in words]
    lines = [f"### {name}", "", *([words, ""] if words else [])]
    if shared:
        lines += [f"{'Also' if words else 'Arguments'}: {', '.join(f'`{option}=`' for option in shared)}.", ""]
    return "\n".join([*lines, f"![{name}](pictures/schedule-{name}.png)", ""])


def described(docstring: str) -> str:
    """A Google docstring as Markdown: entries of sections as lists, without the shared arguments."""
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
    # A section may have had only shared arguments.
    return "\n".join(lines).removesuffix("Arguments:\n").rstrip()


def example(name: str) -> Scene:
    """A schedule with p = 4, m = 8 and all times 1; sliced schedules have two sequences of four slices."""
    entry = db.schedules[name]
    if "slices" in entry.options:
        costs = db.StageCosts.of(stages=4 * entry.default_chunks, activation=1 / entry.default_chunks)
        return Scene(db.simulate(entry(devices=4, micro_batches=2, slices=4), costs), title=name)
    costs = db.StageCosts.of(stages=4 * entry.default_chunks, offload=0.5, activation=1 / entry.default_chunks)
    return Scene(db.simulate(entry(devices=4, micro_batches=8, costs=costs), costs), title=name)


def main() -> None:
    """Write the page and the missing pictures: pictures of another machine differ in some pixels."""
    for name in db.schedules:
        place = DOCS / "pictures" / f"schedule-{name}.png"
        if not place.exists():
            place.write_bytes(picture([example(name)], "png"))
    (DOCS / "schedules.md").write_text(page())


if __name__ == "__main__":
    main()
