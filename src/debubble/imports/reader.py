"""Reads settings with a check of their type, and records which settings were read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from debubble.imports.defaults import Defaults
from debubble.imports.kinds import BOOLEAN, INTEGER, INTEGERS, NUMBER, STRING, STRINGS, ValueKind, as_yaml, suggest
from debubble.ir import InputError

T = TypeVar("T")


class SettingsReader:
    """Typed access to the settings of a file, which records the names that were read.

    Attributes:
        settings: The file's settings.
        path: The file.
        defaults: The framework's defaults for settings that the file lacks.
        harmless: Name patterns of entries that cost nothing, separated by blanks.
        converts: Name patterns of entries whose strings the framework's parser converts, separated by blanks.
    """

    def __init__(
        self, settings: Mapping[str, Any], path: Path, defaults: Defaults, harmless: str, converts: str = ""
    ) -> None:
        self.settings, self.path, self.defaults = settings, path, defaults
        self.harmless, self.converts = harmless, converts
        self._asked: set[str] = set()
        self.unused: set[str] = set()
        """Names of settings of features that the job does not use, which cost nothing."""

    def _value(self, name: str) -> Any:
        """A setting as written, or the framework's default."""
        self._asked.add(name)
        return self.settings[name] if name in self.settings else self.defaults.values.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        """A setting of any type, or the framework's default; `default` if that is missing, null or `none`."""
        value = self._value(name)
        return default if value in (None, "none", "None") else value

    def entry(self, name: str, kind: ValueKind[T]) -> T | None:
        """A setting of a type; None if it is missing, or is null or `none` and is not converted.

        Raises:
            InputError: if it is of another type.
        """
        value, converts = self._value(name), self.is_converted(name)
        if value is None and not (converts and name in self.settings):
            return None
        if not converts and value in ("none", "None"):
            return None
        read = kind.parse(value, converts=converts)
        if read is None:
            raise self.refusal(name, f"is {as_yaml(value)}, which is {kind.other}")
        return read

    def refusal(self, name: str, words: str) -> InputError:
        """The error on a setting; `words` follow its name."""
        return InputError(f"{self.path}: {name} {words}.")

    def is_converted(self, name: str) -> bool:
        """Tell whether the framework's parser converts a setting's strings."""
        return any(fnmatchcase(name, pattern) for pattern in self.converts.split())

    def defaulted(self, **facts: Sequence[str]) -> dict[str, str]:
        """The facts for which the file has no setting -> the source of their defaults.

        Args:
            facts: Fact -> names of the settings that determine it.
        """
        return {
            fact: self.defaults.source
            for fact, names in facts.items()
            if all(self.settings.get(name) is None for name in names)
        }

    def text(self, name: str, default: str) -> str:
        """A string; raises InputError if the setting is not one."""
        value = self.entry(name, STRING)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean; raises InputError if the setting is neither true nor false."""
        value = self.entry(name, BOOLEAN)
        return default if value is None else value

    def one_of(self, name: str, default: str, words: Collection[str]) -> str:
        """One of several strings; raises InputError if the setting is another.

        Args:
            name: The setting.
            default: Its value if it is missing.
            words: The allowed strings; `none` may be one of them.
        """
        value = self._value(name)
        if value is None and not (self.is_converted(name) and name in self.settings):
            return default
        if not isinstance(value, str) or value not in words:
            raise self.refusal(name, f"is {as_yaml(value)}, which is none of {', '.join(words)}{suggest(value, words)}")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """The value of a choice such as `torch.bfloat16`; raises InputError if the setting is no choice."""
        word = self.text(name, default).removeprefix("torch.")
        if word not in choices:
            raise self.refusal(name, f"is '{word}', and only {', '.join(choices)} are priced{suggest(word, choices)}")
        return choices[word]

    def number(self, name: str, default: int | None = None) -> int:
        """An integer (for degrees and batches use `size`); raises InputError if it is missing or no integer."""
        if self.get(name) == "auto":
            raise self.refusal(name, f"is 'auto', which your trainer fills in: give it with --args '--{name} N'")
        value = self.entry(name, INTEGER)
        if value is None:
            value = default
        if value is None:
            raise self.refusal(name, f"is missing: add it with --args '--{name} N'")
        return value

    def share(self, name: str, default: float = 1.0) -> float:
        """A number between 0 and 1; raises InputError if the setting is another."""
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
        """A sentence if a setting has none of the values that the prediction assumes.

        Args:
            name: The setting.
            values: The values that the prediction assumes.
            default: The framework's value if the setting is missing; None: the first of `values`.
        """
        value = self.get(name, values[0] if default is None else default)
        if value not in values or (isinstance(value, bool) and not any(value is expected for expected in values)):
            yield f"{name} is {value}, and the prediction counts on {values[0]}."

    @property
    def has_read(self) -> bool:
        """True if any of the file's settings was read."""
        return not self._asked.isdisjoint(self.settings)

    @property
    def asked(self) -> frozenset[str]:
        """Names that were read, whether the file has them or not."""
        return frozenset(self._asked)

    def skip(self, prefix: str) -> None:
        """Mark all settings with a prefix as read, because others determine them."""
        self._asked.update(name for name in self.settings if name.startswith(prefix))

    def mark_unused(self, prefix: str) -> None:
        """Mark all settings with a prefix as unused, because the job does not use the feature that they configure."""
        self.unused.update(name for name in self.settings if name.startswith(prefix))

    @property
    def names(self) -> Iterable[str]:
        """Names of all settings, including the defaults."""
        return {**self.defaults.values, **self.settings}

    @property
    def missing(self) -> list[str]:
        """Names that were read and that the file lacks."""
        return sorted(self._asked - self.settings.keys())

    @property
    def unasked(self) -> list[str]:
        """Names of the file's settings that were not read."""
        return [name for name in self.settings if name not in self._asked]

    def size(self, name: str, default: int | None = None, *, instead: int | None = None) -> int:
        """A positive integer; raises InputError if it is missing without a default, or is another value.

        Args:
            name: The setting.
            default: Its value if it is missing.
            instead: The user's value, which overrides the setting; None: none.
        """
        if instead is not None:
            self._asked.add(name)
            return instead
        return self._check_minimum(1, name, self.number(name, default))

    def count(self, name: str, default: int = 0) -> int:
        """A non-negative integer; raises InputError if the setting is another value."""
        return self._check_minimum(0, name, self.number(name, default))

    def _check_minimum(self, minimum: int, name: str, value: int) -> int:
        if value < minimum:
            raise self.refusal(name, f"is {value}, and must be at least {minimum}")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of integers, empty if it is missing; raises InputError if the setting is another value."""
        return self.entry(name, INTEGERS) or []

    def texts(self, name: str, default: Sequence[str] = ()) -> list[str]:
        """A list of strings; raises InputError if the setting is another value."""
        value = self.entry(name, STRINGS)
        return list(default) if value is None else value

    def check_tables(self) -> None:
        """Raise InputError if a setting is a table but should be a value, or the other way round.

        Call it after all settings were read.
        """
        for name in self.unasked:
            parts = name.split(".")
            above = (".".join(parts[:count]) for count in range(1, len(parts)))
            if entry := next((p for p in above if p in self._asked and not self._is_section(p)), None):
                raise self.refusal(entry, f"is a table, with {name.removeprefix(f'{entry}.')}, and it has one value")
            if self.settings[name] not in (None, {}) and self._is_section(name):
                entry = min(prefix for prefix in self._asked if prefix.startswith(f"{name}."))
                raise self.refusal(name, f"is {as_yaml(self.settings[name])}, and it is a table, as in {entry}")

    def _is_section(self, name: str) -> bool:
        return any(asked.startswith(f"{name}.") for asked in self._asked)
