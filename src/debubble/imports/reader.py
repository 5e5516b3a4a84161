"""Settings that are asked for by their kind, and the sentence on one that is of another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from debubble.imports.defaults import Defaults
from debubble.imports.kinds import NUMBER, SWITCH, WHOLE, WHOLES, WORD, WORDS, ValueKind, meant, shown
from debubble.ir import InputError

T = TypeVar("T")


class SettingsReader:
    """Settings that are asked for by kind, and know which of them were.

    Attributes:
        settings: The file's settings.
        path: The file.
        defaults: What the framework takes for settings that the file does not have.
        harmless: Patterns of the names of entries that cost nothing, in one text.
        converts: Patterns of the names of entries whose words the framework's parser converts, in one text.
    """

    def __init__(
        self, settings: Mapping[str, Any], path: Path, defaults: Defaults, harmless: str, converts: str = ""
    ) -> None:
        self.settings, self.path, self.defaults = settings, path, defaults
        self.harmless, self.converts = harmless, converts
        self._asked: set[str] = set()
        self.unused: set[str] = set()
        """Names of settings of features that the job does not use: they cost nothing."""

    def _value(self, name: str) -> Any:
        """A setting as it stands there, or the framework's default."""
        self._asked.add(name)
        return self.settings[name] if name in self.settings else self.defaults.values.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting of any kind, or the framework's default; `default` where that is missing, null or `none`."""
        value = self._value(name)
        return default if value in (None, "none", "None") else value

    def entry(self, name: str, kind: ValueKind[T]) -> T | None:
        """A setting of a kind; None where it is missing, or null or `none` and no parser converts it.

        Raises:
            InputError: if it is of another kind.
        """
        value, converts = self._value(name), self.is_converted(name)
        if value is None and not (converts and name in self.settings):
            return None
        if not converts and value in ("none", "None"):
            return None
        read = kind.of(value, converts=converts)
        if read is None:
            raise self.refusal(name, f"is {shown(value)}, which is {kind.other}")
        return read

    def refusal(self, name: str, words: str) -> InputError:
        """The error on a setting, as a sentence of these words."""
        return InputError(f"{self.path}: {name} {words}.")

    def is_converted(self, name: str) -> bool:
        """Tell whether the framework's parser converts a setting's words."""
        return any(fnmatchcase(name, pattern) for pattern in self.converts.split())

    def unsaid(self, **facts: Sequence[str]) -> dict[str, str]:
        """The facts of which the file has none of the settings -> whose default stands for them.

        Args:
            facts: Fact -> names of the settings that say it.
        """
        return {
            fact: self.defaults.of
            for fact, names in facts.items()
            if all(self.settings.get(name) is None for name in names)
        }

    def text(self, name: str, default: str) -> str:
        """A word; raises InputError if the setting is none."""
        value = self.entry(name, WORD)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether a switch is on; raises InputError if the setting is neither true nor false."""
        value = self.entry(name, SWITCH)
        return default if value is None else value

    def one_of(self, name: str, default: str, words: Collection[str]) -> str:
        """One of these words; raises InputError if the setting is none of them.

        Args:
            name: The setting.
            default: Its value where it is missing.
            words: The words, of which `none` may be one.
        """
        value = self._value(name)
        if value is None and not (self.is_converted(name) and name in self.settings):
            return default
        if not isinstance(value, str) or value not in words:
            raise self.refusal(name, f"is {shown(value)}, which is none of {', '.join(words)}{meant(value, words)}")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """What a word such as `torch.bfloat16` stands for; raises InputError if it is none of the choices."""
        word = self.text(name, default).removeprefix("torch.")
        if word not in choices:
            raise self.refusal(name, f"is '{word}', and only {', '.join(choices)} are priced{meant(word, choices)}")
        return choices[word]

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number (degrees and batches are a `size`); raises InputError if it is missing, or is none."""
        if self.get(name) == "auto":
            raise self.refusal(name, f"is 'auto', which your trainer fills in: give it with --args '--{name} N'")
        value = self.entry(name, WHOLE)
        if value is None:
            value = default
        if value is None:
            raise self.refusal(name, f"is missing: add it with --args '--{name} N'")
        return value

    def share(self, name: str, default: float = 1.0) -> float:
        """A number between 0 and 1; raises InputError if the setting is none."""
        value = self.entry(name, NUMBER)
        if value is None:
            return default
        if not 0 <= value <= 1:
            raise self.refusal(name, f"is {value:g}, which is no share between 0 and 1")
        return value

    def __contains__(self, name: str) -> bool:
        self._asked.add(name)
        return name in self.settings or name in self.defaults.values

    def assume(self, name: str, *values: Any, default: Any = None) -> Iterator[str]:
        """A sentence if a setting has none of the values that the prediction counts on.

        Args:
            name: The setting.
            values: What the prediction counts on.
            default: The framework's own value where the setting is missing; None: one that is counted on.
        """
        value = self.get(name, values[0] if default is None else default)
        if value not in values or (isinstance(value, bool) and not any(value is each for each in values)):
            yield f"{name} is {value}, and the prediction counts on {values[0]}."

    @property
    def has_read(self) -> bool:
        """True if any of the file's settings was asked for."""
        return not self._asked.isdisjoint(self.settings)

    @property
    def asked(self) -> frozenset[str]:
        """Names that were asked for."""
        return frozenset(self._asked)

    def skip(self, prefix: str) -> None:
        """Count all settings that begin so as asked for: something else says what they say."""
        self._asked.update(name for name in self.settings if name.startswith(prefix))

    def set_aside(self, prefix: str) -> None:
        """Count all settings that begin so as costing nothing: the job does not use what they configure."""
        self.unused.update(name for name in self.settings if name.startswith(prefix))

    @property
    def names(self) -> Iterable[str]:
        """Names of all settings, the defaults' too."""
        return {**self.defaults.values, **self.settings}

    @property
    def missing(self) -> list[str]:
        """Names that were asked for, and that the file does not have."""
        return sorted(self._asked - self.settings.keys())

    @property
    def left(self) -> list[str]:
        """Names of the settings that nobody asked for."""
        return [name for name in self.settings if name not in self._asked]

    def size(self, name: str, default: int | None = None, *, instead: int | None = None) -> int:
        """A positive whole number; raises InputError if it is missing without a default, or is none.

        Args:
            name: The setting.
            default: Its value where it is missing.
            instead: What the user gives in its place, whatever it is; None: nothing.
        """
        if instead is not None:
            self._asked.add(name)
            return instead
        return self._at_least(1, name, self.number(name, default))

    def count(self, name: str, default: int = 0) -> int:
        """A whole number that may be 0; raises InputError if the setting is none."""
        return self._at_least(0, name, self.number(name, default))

    def _at_least(self, least: int, name: str, value: int) -> int:
        if value < least:
            raise self.refusal(name, f"is {value}, and must be at least {least}")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers, none if it is missing; raises InputError if the setting is anything else."""
        return self.entry(name, WHOLES) or []

    def texts(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """A list of words; raises InputError if the setting is anything else."""
        value = self.entry(name, WORDS)
        return list(default) if value is None else value

    def check_tables(self) -> None:
        """Raise InputError if a setting is a table where it has one value, or has one value where it is a table.

        It is called when all settings were asked for.
        """
        for name in self.left:
            parts = name.split(".")
            above = (".".join(parts[:count]) for count in range(1, len(parts)))
            if entry := next((each for each in above if each in self._asked and not self._is_section(each)), None):
                raise self.refusal(entry, f"is a table, with {name.removeprefix(f'{entry}.')}, and it has one value")
            if self.settings[name] not in (None, {}) and self._is_section(name):
                entry = min(each for each in self._asked if each.startswith(f"{name}."))
                raise self.refusal(name, f"is {shown(self.settings[name])}, and it is a table, as in {entry}")

    def _is_section(self, name: str) -> bool:
        return any(each.startswith(f"{name}.") for each in self._asked)
