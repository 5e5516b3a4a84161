"""Text as packed sequences of byte tokens, in an order that depends on nothing but the seed.

Sample i of a run is the same whatever the number of ranks, the partition, or the restarts before it: what a
checkpoint must remember of the data is one number.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from debubble.ir import InputError

VOCABULARY = 256
"""Tokens are bytes; 0, which no text contains, ends each file."""

Tokens = npt.NDArray[np.int64]

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """All files after each other, each followed by a 0."""

    tokens: npt.NDArray[np.uint8]

    @staticmethod
    def load(path: Path | None = None) -> Corpus:
        """Read a file, the text files of a directory, or (None) the sources of Python's standard library.

        Raises InputError if there is nothing to read.
        """
        if path is None:
            files = _library_sources()
        elif path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        elif path.exists():
            files = [path]
        else:
            raise InputError(f"There is no data file or directory {path}.")
        try:
            texts = [content for content in (file.read_bytes() for file in files) if b"\0" not in content]
        except OSError as error:
            raise InputError(f"The data {error.filename} cannot be read: {error.strerror}.") from error
        if not any(texts):
            raise InputError(f"{path} holds no text: give a text file or a directory with some.")
        return Corpus(np.frombuffer(b"\0".join([*texts, b""]), dtype=np.uint8))


def _library_sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(p for p in root.rglob("*.py") if not _SKIPPED.intersection(p.relative_to(root).parts))


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The samples of a run: every window of `sequence_length` tokens once per epoch, each epoch shuffled anew."""

    corpus: Corpus
    sequence_length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.per_epoch:
            raise InputError(
                f"The data has {len(self.corpus.tokens)} bytes, too few for one sequence of {self.sequence_length}:"
                " give more text or a shorter sequence."
            )

    @property
    def per_epoch(self) -> int:
        return (len(self.corpus.tokens) - 1) // self.sequence_length

    def batch(self, first: int, *, count: int) -> Tokens:
        """Samples `first` to `first + count`, [count, length + 1]: each token is to predict the next."""
        epochs, places = np.divmod(np.arange(first, first + count), self.per_epoch)
        windows = np.concatenate([self._order(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs)])
        positions = windows[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        return self.corpus.tokens[positions].astype(np.int64)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, int(epoch)]).permutation(self.per_epoch)
