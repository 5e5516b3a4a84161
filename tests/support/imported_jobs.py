"""Jobs of other frameworks, imported from a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import debubble as db
from debubble.imports import imports
from debubble.imports.job import ImportedJob
from debubble.imports.registry import UserFacts


def job(
    framework: str, folder: Path, name: str, text: str, *, cluster: str = "4xA100-80GB", **given: Any
) -> ImportedJob:
    """The job that a framework's file of this name and text describes, with what its user adds."""
    file = folder / name
    file.write_text(text)
    importer = imports[framework]
    return importer.job(importer.settings(file), file, UserFacts(cluster=db.Cluster.parse(cluster), **given))
