"""A folder of checkpoints: their order, their progress, and the manifest with size and SHA-256 of every file.

The manifest is written last, so a checkpoint that has one is whole.  Checkpoints of earlier versions have none.  Needs
no torch.
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
    """The settings that a checkpoint remembers, by the options' names; None: an earlier version did not write it.

    Others, such as the paths of a run, are the command line's alone.
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
        """The settings that were written."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class RunProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of a run: what resuming needs next to tensors.

    Random numbers follow from `seed`, and with `step` and `samples` from nothing else.
    """

    step: Count
    """Steps done."""
    samples: Count
    """Sequences seen."""
    seed: Count
    model: Mapping[str, Any]
    """The model's config, to refuse a checkpoint of another one."""
    recipe: SavedRecipe = SavedRecipe()
    """Settings of the optimizer and of its learning rate's schedule."""
    data: Mapping[str, str] | None = None
    """The options that say what the run reads, to refuse a run of other data by mistake; nothing opens their values."""
    global_batch: Count | None = None
    """Sequences of a step; None: an earlier version did not write it, nor their length."""
    sequence_length: Count | None = None
    """Tokens of each."""
    loss_scale: tuple[float, int] | None = None
    """The loss scale of an fp16 run, and the steps since it changed."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder in the order of their steps, oldest first."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path:
    """The newest checkpoint.  Raises InputError if there is none."""
    found = checkpoints(folder)
    if not found:
        raise InputError(f"There is no checkpoint in {folder} to resume from.")
    return found[-1]


def progress_of(checkpoint: Path) -> RunProgress:
    """Read how far the checkpoint's run was.  Raises InputError if debubble has not written it."""
    try:
        return decode_json((checkpoint / PROGRESS).read_bytes(), RunProgress)
    except OSError as error:
        raise InputError(f"{checkpoint} is not a whole checkpoint: {error}.") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{checkpoint / PROGRESS} is not what debubble writes: {error}.") from error


MANIFEST, PROGRESS, METADATA = "manifest.json", "progress.json", ".metadata"


class DamagedError(InputError):
    """A checkpoint is not what was written."""

    def __init__(self, checkpoint: Path, what: str) -> None:
        super().__init__(f"The checkpoint {checkpoint} is damaged: {what}.")
        self.checkpoint, self.what = checkpoint, what

    def __reduce__(self) -> tuple[type[DamagedError], tuple[Path, str]]:
        return type(self), (self.checkpoint, self.what)


@dataclass(frozen=True)
class Digest:
    """Size and checksum of a file."""

    bytes: int
    sha256: str

    @staticmethod
    def of(file: Path) -> Digest:
        """Read a file.  Raises OSError if it cannot be read."""
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return Digest(stream.tell(), sha256)


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint by name, without the manifest itself."""

    files: Mapping[str, Digest]


def write_manifest(checkpoint: Path, files: Mapping[str, Digest]) -> None:
    """Write the manifest: the checkpoint is whole with it.  Raises InputError if it cannot be written."""
    write_json(checkpoint / MANIFEST, Manifest(files))


def check_sizes(checkpoint: Path) -> Manifest | None:
    """The manifest, if all files are there in their sizes; None for a checkpoint that has none.

    Raises DamagedError if a file is missing or of another size.
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
    """Raise DamagedError if one of these files is not what was written."""
    for name in names:
        try:
            same = Digest.of(checkpoint / name) == manifest.files[name]
        except OSError as error:
            raise DamagedError(checkpoint, f"{name} cannot be read: {error.strerror}") from error
        if not same:
            raise DamagedError(checkpoint, f"the checksum of {name} is not that of what was written")
