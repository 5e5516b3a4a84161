"""Makes one long array of tokens of text files, bytes or a Hugging Face tokenizer's, and keeps it in a cache."""

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
"""Characters that are tokenized at a time; pieces end at line ends."""
PIECES_PER_CALL = 64
"""Pieces that the tokenizer is given at a time, which it divides among its threads."""


@dataclass(frozen=True)
class HfTokenizer:
    """A `tokenizer.json`, or a folder with one and perhaps a `tokenizer_config.json`.

    `end` is the model's token that ends a text, for tokenizers that do not say which theirs is.
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
        """The token that ends each text."""
        config = self._file.with_name("tokenizer_config.json")
        settings = parse(json.loads, config.read_bytes(), f"{config} is no JSON") if config.is_file() else {}
        named = settings.get("eos_token") if isinstance(settings, dict) else None
        text = named.get("content") if isinstance(named, dict) else named
        if not isinstance(text, str | None):
            raise InputError(f"{config} names an end of texts that is no text: {text!r}.")
        found: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return self.end if found is None else found

    def encode(self, text: str) -> list[int]:
        """The tokens of a short text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def tokens(self, files: Sequence[Path]) -> npt.NDArray[Any]:
        """All files after each other, each ended by the separator; kept on disk and read as it is needed."""
        dtype = np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.uint32)
        place = user_cache("tokens") / f"{self._fingerprint(files)}.{dtype.name}"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            # A folder of its own, which goes however this ends; renaming takes the file out of it.
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                unfinished = Path(folder) / place.name
                with unfinished.open("wb") as file:
                    for part in self._encode(files):
                        file.write(np.array(part, dtype=dtype).tobytes())
                unfinished.rename(place)
        empty = not place.stat().st_size
        return np.zeros(0, dtype=dtype) if empty else np.memmap(place, dtype=dtype, mode="r")

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
    """Tell whether the file's beginning has no zero byte, which no text contains."""
    with file.open("rb") as opened:
        return b"\0" not in opened.read(PIECE_CHARACTERS)


def _pieces(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace", newline="") as text:
        while piece := text.read(PIECE_CHARACTERS):
            yield piece + text.readline()
