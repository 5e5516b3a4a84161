"""Text as packed sequences of tokens, in an order that depends on the seed only.

Sample i does not depend on the number of ranks, the partition or restarts, so a checkpoint stores a single number.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from debubble.ir import InputError
from debubble.training.data.tokenizer import HfTokenizer, is_text

VOCABULARY = 256
"""Size of the byte vocabulary; token 0, which no text contains, ends each file."""

Tokens = npt.NDArray[np.int64]

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def load_tokens(path: Path | None = None, tokenizer: HfTokenizer | None = None) -> npt.NDArray[Any]:
    """Read a file, the text files of a directory, or (None) the sources of Python's standard library.

    Files are concatenated, each followed by the end-of-text token.  Tokens are the tokenizer's, or bytes.  Raises
    InputError if there is nothing to read.
    """
    try:
        files = [file for file in _files(path) if file.stat().st_size and is_text(file)]
        if not files:
            raise InputError(f"{path} holds no text: give a text file or a directory with some.")
        if tokenizer is not None:
            return tokenizer.tokens(files)
        return np.frombuffer(b"\0".join([*(file.read_bytes() for file in files), b""]), dtype=np.uint8)
    except OSError as error:
        raise InputError(f"The data {error.filename} cannot be read: {error.strerror}.") from error


def tokens_of(text: str, tokenizer: HfTokenizer | None) -> list[int]:
    """The tokens of a text: the tokenizer's, or bytes."""
    return list(text.encode()) if tokenizer is None else tokenizer.encode(text)


def text_of(tokens: Sequence[int], tokenizer: HfTokenizer | None) -> str:
    """Decode tokens; invalid bytes become replacement characters."""
    if tokenizer is not None:
        return tokenizer.decode(tokens)
    return bytes(token if token < VOCABULARY else 0xFF for token in tokens).decode(errors="replace")


def _files(path: Path | None) -> list[Path]:
    """The file, those of the directory, or (None) the sources of Python's standard library."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return sorted(p for p in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(p.relative_to(root).parts))
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    if path.exists():
        return [path]
    raise InputError(f"There is no data file or directory {path}.")


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The samples of a run: every window of `sequence_length` tokens once per epoch, reshuffled every epoch."""

    tokens: npt.NDArray[Any]
    sequence_length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.per_epoch:
            raise InputError(
                f"The data has {len(self.tokens)} tokens, too few for one sequence of {self.sequence_length}:"
                " give more text or a shorter sequence."
            )

    @property
    def per_epoch(self) -> int:
        """Number of windows."""
        return (len(self.tokens) - 1) // self.sequence_length

    def batch(self, first: int, *, count: int) -> Tokens:
        """Samples `first` to `first + count`, [count, length + 1]: inputs and shifted targets overlap."""
        return self.windows(shuffled_indices(first, count=count, per_epoch=self.per_epoch, seed=self.seed))

    def windows(self, windows: Tokens) -> Tokens:
        """Windows by their indices in the text, [windows, length + 1]."""
        positions = windows[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens: Tokens = self.tokens[positions].astype(np.int64)
        return tokens


def shuffled_indices(first: int, *, count: int, per_epoch: int, seed: int) -> npt.NDArray[np.int64]:
    """Indices, below `per_epoch`, of `count` samples from `first` on, in a new order every epoch."""
    epochs, places = np.divmod(np.arange(first, first + count), per_epoch)
    indices = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        indices[in_epoch] = _order(int(epoch), per_epoch, seed)[places[in_epoch]]
    return indices


@lru_cache(maxsize=2)  # the epoch that ends and the one that begins
def _order(epoch: int, per_epoch: int, seed: int) -> npt.NDArray[Any]:
    """The order of an epoch's samples, in 4 bytes each if possible, because a run may have ten million."""
    order = np.random.default_rng([seed, epoch]).permutation(per_epoch)
    return order.astype(np.uint32) if per_epoch <= 2**32 else order
