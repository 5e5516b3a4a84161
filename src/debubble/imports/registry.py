"""The importers' registry: each reads a framework's configuration as an ImportedJob, decorated with `@importer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from debubble.costs import Cluster
from debubble.imports.job import ImportedJob
from debubble.models import Model
from debubble.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Given:
    """The facts that a configuration may leave to its user.

    Attributes:
        cluster: The devices of the job.
        model: The model; None: as the configuration describes it.
        pipeline: Pipeline devices; None: as the configuration says.
        sequence_length: Tokens per sequence; None: as the configuration says.
        micro_batches: Micro-batches per step; None: as the configuration says.
    """

    cluster: Cluster
    model: Model | None = None
    pipeline: int | None = None
    sequence_length: int | None = None
    micro_batches: int | None = None


Settings = Mapping[str, Any]
"""A configuration's settings, by the names that its framework has for them."""


@dataclass(frozen=True)
class Importer:
    """One framework's way in.

    Attributes:
        name: The target that the framework is.
        settings: Reads a file's settings, flat.
        job: What they say of the job.
        file: Which of the files that an export writes has the settings.
    """

    name: str
    settings: Callable[[Path], Settings]
    job: Callable[[Settings, Path, Given], ImportedJob]
    file: str


imports: Registry[Importer] = Registry("debubble.imports", what="framework to import from")


def importer(
    name: str, *, settings: Callable[[Path], Settings], file: str
) -> Callable[[Callable[[Settings, Path, Given], ImportedJob]], Callable[[Settings, Path, Given], ImportedJob]]:
    """Register an importer under the name of its target.

    Args:
        name: The target's name.
        settings: Reads a file's settings; raises InputError with a sentence if it is none.
        file: The file of an export that has the settings.
    """

    def register(job: Callable[[Settings, Path, Given], ImportedJob]) -> Callable[[Settings, Path, Given], ImportedJob]:
        imports.add(name, Importer(name, settings, job, file))
        return job

    return register
