"""A folder of checkpoints: their order, their progress, and the manifest with size and SHA-256 of every file.

The manifest is written last, so a checkpoint that has one is complete.  Checkpoints of earlier versions have none.
Needs no torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from debubble.files import decode_json, write_json
from debubble.ir import InputError

Count = Annotated[int, msgspec.Meta(ge=0)]


class SavedRecipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that a checkpoint stores, by the options' names; None: an earlier version did not write it.

    Other settings, such as the paths of a run, come from the command line only.
    """

    steps: Count | None = None
    learning_rate: float | None = None
    warmup: Count | None = None
    lr_schedule: str | None = None
    optimizer: str | None = None
    optimizer_settings: Mapping[str, Any] | None = None
    weight_decay: float | None = None
    clip: float | None = None
    ema_decay: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the checkpoint has, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class RunProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of a run: everything besides tensors that resuming needs.

    Random numbers depend on `seed`, `step` and `samples` only.
    """

    step: Count
    """Steps done."""
    samples: Count
    """Sequences seen."""
    seed: Count
    model: Mapping[str, Any]
    """The model's config, to reject a checkpoint of another model."""
    recipe: SavedRecipe = SavedRecipe()
    """Settings of the optimizer and the learning rate schedule."""
    data: Mapping[str, str] | None = None
    """The options that select the data, to reject other data given by mistake; their values are never opened."""
    global_batch: Count | None = None
    """Sequences per step; None: an earlier version wrote neither it nor their length."""
    sequence_length: Count | None = None
    """Tokens per sequence."""
    loss_scale: tuple[float, int] | None = None
    """The loss scale of an fp16 run, and the steps since it changed."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, in ascending order of steps."""
    folders = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path:
    """The newest checkpoint.  Raises InputError if there is none."""
    existing = checkpoints(folder)
    if not existing:
        raise InputError(f"There is no checkpoint in {folder} to resume from.")
    return existing[-1]


def progress_of(checkpoint: Path) -> RunProgress:
    """Read the progress of a checkpoint.  Raises InputError if debubble has not written it."""
    try:
        return decode_json((checkpoint / PROGRESS).read_bytes(), RunProgress)
    except OSError as error:
        raise InputError(f"{checkpoint} is not a whole checkpoint: {error}.") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{checkpoint / PROGRESS} is not what debubble writes: {error}.") from error


MANIFEST, PROGRESS, METADATA = "manifest.json", "progress.json", ".metadata"


class DamagedError(InputError):
    """A checkpoint's files are missing or differ from those written."""

    def __init__(self, checkpoint: Path, damage: str) -> None:
        super().__init__(f"The checkpoint {checkpoint} is damaged: {damage}.")
        self.checkpoint, self.damage = checkpoint, damage

    def __reduce__(self) -> tuple[type[DamagedError], tuple[Path, str]]:
        return type(self), (self.checkpoint, self.damage)


@dataclass(frozen=True)
class Digest:
    """Size and checksum of a file."""

    bytes: int
    sha256: str

    @staticmethod
    def from_file(file: Path) -> Digest:
        """Compute the digest of a file.  Raises OSError if it cannot be read."""
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return Digest(stream.tell(), sha256)


@dataclass(frozen=True)
class Manifest:
    """The digests of a checkpoint's files by name, without the manifest itself."""

    files: Mapping[str, Digest]


def write_manifest(checkpoint: Path, files: Mapping[str, Digest]) -> None:
    """Write the manifest, which marks the checkpoint complete.  Raises InputError if it cannot be written."""
    write_json(checkpoint / MANIFEST, Manifest(files))


def check_sizes(checkpoint: Path) -> Manifest | None:
    """Check that all files exist with their sizes, and return the manifest; None for a checkpoint without one.

    Raises DamagedError if a file is missing or has another size.
    """
    if not (checkpoint / MANIFEST).exists():
        for name in (PROGRESS, METADATA):
            if not (checkpoint / name).exists():
                raise DamagedError(checkpoint, f"{name} is missing")
        return None
    try:
        manifest = decode_json((checkpoint / MANIFEST).read_bytes(), Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise DamagedError(checkpoint, f"{MANIFEST} cannot be read") from error
    for name, digest in manifest.files.items():
        if Path(name).name != name:
            raise DamagedError(checkpoint, f"{MANIFEST} names {name}, which is no file of its folder")
        try:
            size = (checkpoint / name).stat().st_size
        except OSError as error:
            raise DamagedError(checkpoint, f"{name} is missing") from error
        if size != digest.bytes:
            raise DamagedError(checkpoint, f"{name} has {size} bytes, not the {digest.bytes} that were written")
    return manifest


def check_contents(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise DamagedError if the checksum of one of these files differs from the manifest."""
    for name in names:
        try:
            same = Digest.from_file(checkpoint / name) == manifest.files[name]
        except OSError as error:
            raise DamagedError(checkpoint, f"{name} cannot be read: {error.strerror}") from error
        if not same:
            raise DamagedError(checkpoint, f"the checksum of {name} is not that of what was written")
