"""Megatron-LM's arguments by type: words, numbers, switches, and which of them were asked for."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from debubble.imports.command_line import how_to_give, variables_in
from debubble.imports.settings import SOURCED, SettingsReader
from debubble.ir import InputError

SIMILARITY = 0.9
"""Similarity (difflib's cutoff) from which an argument may be the one that is missing, misspelt."""


class Arguments(SettingsReader):
    """Arguments, whose values are words: the numbers among them, and which of them were asked for."""

    @property
    def sources(self) -> str:
        """The hint, for a sentence on a missing argument, that a sourced script that is not there may set it."""
        names = " ".join(self.words(SOURCED))
        if variables_in(names):
            return f"; it sources {names}: {how_to_give(names, {})}, or"
        return f"; it sources {names}, which is not next to it: put it there, or" if names else ";"

    def get(self, name: str, default: Any = None) -> Any:
        """An argument's value; `default` where it is missing or off."""
        value = super().get(name, default)
        return default if value is False else value

    def __contains__(self, name: str) -> bool:
        return self._value(name) not in (None, False)

    def word(self, name: str, default: str | None = None) -> str | None:
        """The value of an argument that has one."""
        value = self.get(name, default)
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return value if value is None else str(value)

    def words(self, name: str) -> tuple[str, ...]:
        """The words after an argument; those of a list in one word are several."""
        value = self.get(name, ())
        if isinstance(value, str):
            return tuple(filter(None, value.strip("[]").replace(",", " ").split()))
        return () if value is True else tuple(map(str, value))

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; raises InputError if it is missing without a default, or is none."""
        word = self.word(name)
        if word is None:
            if default is None:
                near = get_close_matches(
                    name, [each for each in self.settings if each.startswith("--")], 1, cutoff=SIMILARITY
                )
                misspelt = f", but {near[0]}" if near else ""
                raise InputError(
                    f"{self.path} does not say {name}{misspelt}{self.sources} give it with --args, as in"
                    f" --args '{name} N'."
                )
            return default
        return self._whole(name, word)

    def numbers(self, name: str) -> list[int]:
        """The whole numbers after an argument; raises InputError if one is none."""
        return [self._whole(name, word) for word in self.words(name)]

    def _whole(self, name: str, word: str) -> int:
        try:
            return int(word)
        except ValueError:
            hint = "which is no whole number that is known here"
            if "$" in word:
                sources = self.sources.removesuffix(" or").replace(";", ":", 1) if self.words(SOURCED) else ":"
                variables = f"{how_to_give(word, {})}, or" if variables_in(word) else "give it with"
                hint = f"which the file does not tell{sources} {variables} --args '{name} N'"
            raise InputError(f"{self.path}: {name} is '{word}', {hint}.") from None

    def share(self, name: str) -> float:
        """A number between 0 and 1, which is 1 if the argument is not there; raises InputError if it is none."""
        word = self.word(name, "1")
        try:
            share = float(word or "")
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise InputError(f"{self.path}: {name} is '{word}', which is no share between 0 and 1.")
        return share
