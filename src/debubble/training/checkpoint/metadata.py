"""Reads the `.metadata` of torch.distributed.checkpoint, a pickle, so that no foreign code can run.

Torch unpickles whatever the file names.  Here only the classes that a checkpoint's metadata consists of are known.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from debubble.training.checkpoint.folder import METADATA, DamagedError

KNOWN: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))}),
    "pathlib": frozenset({"PosixPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
}  # fmt: skip
"""Names that a metadata file may contain, by module."""


class CheckpointReader(FileSystemReader):
    """Reads the tensors of a checkpoint's folder, whose metadata has been read already."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, in place of torch's unpickling."""
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def read_metadata(checkpoint: Path) -> Metadata:
    """Read a checkpoint's description of its tensors.

    Raises DamagedError if the file is no such metadata, or a file that it names is missing or too short.
    """
    try:
        with (checkpoint / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
    except _ForeignNameError as error:
        what = f"{METADATA} names {error}, which no checkpoint does; nothing of it was run"
        raise DamagedError(checkpoint, what) from None
    except Exception as error:
        raise DamagedError(checkpoint, f"{METADATA} cannot be read") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedError(checkpoint, f"{METADATA} holds no metadata")
    needed: dict[str, int] = {}
    for place in metadata.storage_data.values():
        name = place.relative_path
        needed[name] = max(needed.get(name, 0), place.offset + place.length)
    for name, size in needed.items():
        shard = checkpoint / name
        if Path(name).name != name or not shard.is_file():
            raise DamagedError(checkpoint, f"{name} is missing")
        if shard.stat().st_size < size:
            raise DamagedError(checkpoint, f"{name} has {shard.stat().st_size} bytes instead of {size}")
    return metadata


class _ForeignNameError(Exception):
    """A name in a pickle that no checkpoint's metadata has."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # how some versions of Python pickle an Enum
        if name not in KNOWN.get(module, ()):
            raise _ForeignNameError(f"{module}.{name}")
        return super().find_class(module, name)


def _member(kind: object, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise _ForeignNameError(f"getattr of {kind}")
    return kind[name]
