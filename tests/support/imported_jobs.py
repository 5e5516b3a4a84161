"""Jobs of other frameworks, imported from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import debubble as db
from debubble.imports import imports
from debubble.imports.job import ImportedJob
from debubble.imports.registry import UserFacts


def job(
    framework: str,
    folder: Path,
    name: str,
    text: str,
    *,
    cluster: str = "4xA100-80GB",
    args: str | None = None,
    **facts: Any,
) -> ImportedJob:
    """Import a framework's file with this name and text, started with `args`, and with the user's facts."""
    file = folder / name
    file.write_text(text)
    importer = imports[framework]
    return importer.job(importer.read(file, args), file, UserFacts(cluster=db.Cluster.parse(cluster), **facts))
