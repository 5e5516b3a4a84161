"""Tokenizes text files with a Hugging Face tokenizer into one array, which is cached on disk."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from debubble.files import parse, user_cache
from debubble.ir import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VERSION = 1
PIECE_CHARACTERS = 2**20
"""Characters per tokenized piece; pieces end at line ends."""
PIECES_PER_CALL = 64
"""Pieces per call of the tokenizer, which distributes them over its threads."""


@dataclass(frozen=True)
class HfTokenizer:
    """A `tokenizer.json`, or a folder with one and optionally a `tokenizer_config.json`.

    `end` is the model's end-of-text token, for tokenizers that do not name one.
    """

    path: Path
    end: int | None = None

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError("A tokenizer needs the hf extra: install debubble with it.") from None
        try:
            return Tokenizer.from_str(self._file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more special
            raise InputError(f"{self.path} has no tokenizer that can be read: {error}.") from error

    @property
    def _file(self) -> Path:
        return self.path / "tokenizer.json" if self.path.is_dir() else self.path

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    @cached_property
    def separator(self) -> int | None:
        """The end-of-text token."""
        config = self._file.with_name("tokenizer_config.json")
        settings = parse(json.loads, config.read_bytes(), f"{config} is no JSON") if config.is_file() else {}
        named = settings.get("eos_token") if isinstance(settings, dict) else None
        text = named.get("content") if isinstance(named, dict) else named
        if not isinstance(text, str | None):
            raise InputError(f"{config} names an end of texts that is no text: {text!r}.")
        token: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return self.end if token is None else token

    def encode(self, text: str) -> list[int]:
        """The tokens of a short text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def tokens(self, files: Sequence[Path]) -> npt.NDArray[Any]:
        """The tokens of all files, each ended by the separator, as a memory map of the cached file."""
        dtype = np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.uint32)
        cached = user_cache("tokens") / f"{self._fingerprint(files)}.{dtype.name}"
        if not cached.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            # A temporary folder that is always removed; renaming moves the finished file out of it.
            with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
                unfinished = Path(folder) / cached.name
                with unfinished.open("wb") as file:
                    for ids in self._encode(files):
                        file.write(np.array(ids, dtype=dtype).tobytes())
                unfinished.rename(cached)
        empty = not cached.stat().st_size
        return np.zeros(0, dtype=dtype) if empty else np.memmap(cached, dtype=dtype, mode="r")

    def _encode(self, files: Sequence[Path]) -> Iterator[list[int]]:
        for file in files:
            pieces = _pieces(file)
            while group := list(islice(pieces, PIECES_PER_CALL)):
                for encoded in self._tokenizer.encode_batch(group, add_special_tokens=False):
                    yield encoded.ids
            if self.separator is not None:
                yield [self.separator]

    def _fingerprint(self, files: Sequence[Path]) -> str:
        facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        facts_and_file = (
            json.dumps([VERSION, PIECE_CHARACTERS, self.separator, facts]).encode() + self._file.read_bytes()
        )
        return hashlib.sha256(facts_and_file).hexdigest()[:32]


def is_text(file: Path) -> bool:
    """Tell whether the start of a file has no zero byte, which no text contains."""
    with file.open("rb") as opened:
        return b"\0" not in opened.read(PIECE_CHARACTERS)


def _pieces(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        while piece := text.read(PIECE_CHARACTERS):
            yield piece + text.readline()
