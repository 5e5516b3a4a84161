"""Safe reader of torch.distributed.checkpoint's `.metadata` file, a pickle.

Torch unpickles any class that the file names; this reader allows only the classes that checkpoint metadata consists of.
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

ALLOWED_NAMES: Mapping[str, frozenset[str]] = {
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
"""Module -> names that a metadata file may contain."""


class CheckpointReader(FileSystemReader):
    """Reads the tensors of a checkpoint, given its metadata."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        super().__init__(checkpoint)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the given metadata instead of unpickling the file."""
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def read_metadata(checkpoint: Path) -> Metadata:
    """Read a checkpoint's metadata.

    Raises DamagedError if the file is not checkpoint metadata, or a file that it names is missing or too short.
    """
    try:
        with (checkpoint / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
    except _ForeignNameError as error:
        damage = f"{METADATA} names {error}, which no checkpoint does; nothing of it was run"
        raise DamagedError(checkpoint, damage) from None
    except Exception as error:
        raise DamagedError(checkpoint, f"{METADATA} cannot be read") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedError(checkpoint, f"{METADATA} holds no metadata")
    required_sizes: dict[str, int] = {}
    for location in metadata.storage_data.values():
        name = location.relative_path
        required_sizes[name] = max(required_sizes.get(name, 0), location.offset + location.length)
    for name, size in required_sizes.items():
        shard = checkpoint / name
        if Path(name).name != name or not shard.is_file():
            raise DamagedError(checkpoint, f"{name} is missing")
        if shard.stat().st_size < size:
            raise DamagedError(checkpoint, f"{name} has {shard.stat().st_size} bytes instead of {size}")
    return metadata


class _ForeignNameError(Exception):
    """A name in a pickle that is not allowed in checkpoint metadata."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # how some versions of Python pickle an Enum
        if name not in ALLOWED_NAMES.get(module, ()):
            raise _ForeignNameError(f"{module}.{name}")
        return super().find_class(module, name)


def _enum_member(kind: object, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise _ForeignNameError(f"getattr of {kind}")
    return kind[name]
