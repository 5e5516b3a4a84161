"""Figures of a section, written on every addition, so that nothing is lost if the section is ended."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from debubble.ir import Number


class Figures:
    """A tree of figures in a JSON file; `until`: when the section should be over, on `time.monotonic`'s clock."""

    def __init__(self, path: Path, *, until: float) -> None:
        self._path, self._until = path, until
        self.folder = path.parent
        self.tree: dict[str, Any] = {}

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the section should be over."""
        return self._until - time.monotonic()

    def add(self, *path: str, figures: Any) -> None:
        """Put figures at a path in the tree."""
        place = self.tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = figures
        print(
            f"{self.remaining_seconds:.0f} s left, {'/'.join(path)}: {json.dumps(finite(figures))[:400]}",
            file=sys.stderr,
            flush=True,
        )
        self._write()

    def run(self, work: Callable[[], None], *path: str, needs: float = 0.0) -> None:
        """Do one part of a section, which adds its figures.

        If it fails the traceback stands in its place, and the rest goes on; if there is no time for it, that does.
        """
        if (remaining := self.remaining_seconds) < needs:
            self.add(*path, figures={"left_out": f"{remaining:.0f} s were left, and it needs about {needs:.0f}"})
            return
        try:
            work()
        except Exception:
            self.add(*path, figures={"failed": traceback.format_exc()})

    def measure(self, work: Callable[[], Any], *path: str, needs: float = 0.0) -> None:
        """Do one part of a section, whose return value is the figures at its path."""
        self.run(lambda: self.add(*path, figures=work()), *path, needs=needs)

    def fail(self, reason: str) -> None:
        """End the section with this traceback."""
        self._write(traceback=reason)

    def _write(self, **more: str) -> None:
        partial_file = self._path.with_suffix(".part")
        partial_file.write_text(json.dumps({"figures": finite(self.tree), **more}))
        os.replace(partial_file, self._path)


def finite(figures: Any) -> Any:
    """Figures that JSON can hold, with inf and NaN as text."""
    if isinstance(figures, dict):
        return {str(name): finite(value) for name, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [finite(value) for value in figures]
    if isinstance(figures, float) and not math.isfinite(figures):
        return str(figures)
    return figures


def pair(predicted: Number, measured: Number) -> dict[str, float | None]:
    """A prediction and its measurement."""
    ratio = float(measured) / float(predicted) if predicted else None
    return {"predicted": float(predicted), "measured": float(measured), "ratio": ratio}
