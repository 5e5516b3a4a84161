"""The entries of a file that nobody asked for: known to cost nothing, or not in the prediction.

An entry that is not known is never taken to be free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources

from debubble.imports.harmless import is_harmless
from debubble.imports.reader import SettingsReader
from debubble.ir import InputError

_CUTOFF_OF_KNOWN, _CUTOFF_OF_MISSING = 0.8, 0.94
"""Similarity (difflib's cutoff) from which a name may be another one misspelt: one of all that a framework has, or one
that was looked for in vain."""
NAMED = 12
"""Settings that cost nothing that the terminal names: a log lists hundreds."""


@dataclass(frozen=True)
class Unread:
    """The entries of a file that are not in the prediction, or are known to cost nothing.

    Attributes:
        remarks: Sentences on entries that were read and are predicted otherwise, one each.
        unknown: Names of entries that are not in the prediction.
        free: Names of entries that are known to cost neither time nor memory.
        strange: Of `unknown`, those that the framework does not know, with its nearest name or nothing, and those like
            a name that was looked for in vain.
        framework: The framework, in words.
    """

    remarks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    strange: Mapping[str, str] = field(default_factory=dict)
    framework: str = ""

    @staticmethod
    def of(read: SettingsReader, remarks: Iterable[str]) -> Unread:
        """The entries that were not asked for, after these remarks have asked for theirs.

        Raises:
            InputError: if one of them is a table in place of a value, or the other way round.
        """
        said = tuple(remarks)
        read.check_tables()
        left = sorted(read.left)
        free = tuple(
            name for name in left if name in read.unused or is_harmless(name, read.settings[name], read.harmless)
        )
        unknown, missing = tuple(name for name in left if name not in free), read.missing
        near = {name: get_close_matches(name, missing, 1, cutoff=_CUTOFF_OF_MISSING) for name in unknown}
        return Unread(said, unknown, free, {name: found[0] for name, found in near.items() if found})

    def checked(self, known: Collection[str], framework: str) -> Unread:
        """The entries with the arguments among them that a framework's parser does not know.

        Args:
            known: The names of all arguments.
            framework: The framework, in words.
        """
        strange = {name: _nearest(name, known) for name in self.unknown if name.startswith("--") and name not in known}
        return replace(self, strange=strange, framework=framework)

    def with_misspelt(self, known: Collection[str], framework: str, complete: str = "") -> Unread:
        """The entries with those that are near one of a framework's, and those that it cannot have.

        Args:
            known: The names of the framework's entries.
            framework: The framework, in words.
            complete: Patterns of names of which `known` has all that the framework has, in one text; besides them it
                then has every section.
        """
        if not known:
            return self
        patterns, sections = complete.split(), {name.partition(".")[0] for name in known}

        def is_of_none(name: str) -> bool:
            return name not in known and any(fnmatchcase(name, pattern) for pattern in patterns)

        # Where names are complete, one that is near another is misspelt whatever its section costs.
        near = misspelt(self.free, known) if patterns else {}
        free = tuple(name for name in self.free if not (name in near or is_of_none(name)))
        unknown = tuple(sorted({*self.unknown, *self.free} - {*free}))
        of_none = (
            name for name in unknown
            if is_of_none(name) or (patterns and name[0] != "-" and name.partition(".")[0] not in sections)
        )  # fmt: skip
        strange = {**dict.fromkeys(of_none, ""), **self.strange, **misspelt(unknown, known)}
        return replace(self, unknown=unknown, free=free, strange=strange, framework=framework)

    @property
    def not_predicted(self) -> int:
        """The number of entries that are not in the prediction as they are."""
        return len(self.remarks) + len(self.unknown)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence on entries that are names of the framework misspelt, which it would refuse; none if none is."""
        near = misspelt_words(self.strange)
        whose = f"Not known to {self.framework}, misspelt or of a fork" if self.framework else "Perhaps misspelt"
        return (f"{whose}, and not in the prediction: {near}.",) if near else ()

    def sentences(self, most: int | None = None) -> Iterator[str]:
        """All that is to be known besides the warnings, the remarks first.

        Args:
            most: Names of those that cost nothing; None: all.
        """
        yield from self.remarks
        if forks := tuple(name for name, near in self.strange.items() if not near):
            yield f"Not known to {self.framework}, and not in the prediction: {_names(forks)}."
        if unknown := tuple(name for name in self.unknown if name not in self.strange):
            yield f"Not in the prediction: {_names(unknown)}."
        if self.free:
            yield f"Known to cost neither time nor memory: {_names(self.free, most)}."


@cache
def known_entries(framework: str) -> frozenset[str]:
    """The names of all entries that a framework has or had (tools/framework_entries.py); none if no list is here."""
    file = resources.files(f"debubble.frameworks.{framework}").joinpath("entries.txt")
    return frozenset(file.read_text().split()) if file.is_file() else frozenset()


def misspelt(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """The entries that a framework does not know and that are near one of its own -> that one.

    Args:
        names: The entries' names.
        known: The names of the framework's entries.
    """
    strange = (name for name in names if name not in known and name.removeprefix("--") not in known)
    return {name: near for name in strange if (near := _nearest(name, known))}


def _nearest(name: str, known: Collection[str]) -> str:
    """The nearest of the known names of which section and last part are as near as the whole; nothing if none is."""
    section, _, last = name.rpartition(".")
    for each in get_close_matches(name, known, 5, cutoff=_CUTOFF_OF_KNOWN):
        of_section, _, of_last = each.rpartition(".")
        if _is_near(section, of_section) and _is_near(last, of_last):
            return each
    return ""


def _is_near(word: str, other: str) -> bool:
    return word == other or SequenceMatcher(a=other, b=word).ratio() >= _CUTOFF_OF_KNOWN


def with_misspelt_first(error: InputError, read: SettingsReader, known: Collection[str]) -> InputError:
    """An error on a file, after the question for entries that may be misspelt and have caused it.

    Args:
        error: The error.
        read: The file's settings.
        known: The names of the framework's entries.
    """
    costly = (name for name, value in read.settings.items() if not is_harmless(name, value, read.harmless))
    near = misspelt_words(misspelt(costly, known))
    return InputError(f"{read.path} has {near}.  {error}") if near else error


def misspelt_words(strange: Mapping[str, str]) -> str:
    """The entries that are near others of the framework, each with the question whether that is meant."""
    return ", ".join(f"{name} (did you mean {near}?)" for name, near in strange.items() if near)


def _names(names: tuple[str, ...], most: int | None = None) -> str:
    more = "" if most is None or len(names) <= most else f" and {len(names) - most} more"
    return f"{' '.join(names[:most])}{more}"
