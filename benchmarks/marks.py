"""Tables of the docs that benchmarks write, each between two marks of its page."""

from __future__ import annotations

from pathlib import Path


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Put a table into a page between its marks, in place of what stands there."""
    text = page.read_text()
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    page.write_text(f"{before}\n{table}\n{after}")
