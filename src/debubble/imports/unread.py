"""The entries of a file that the importer does not read: harmless ones, and ones missing from the prediction.

An unknown entry is never taken to be harmless.
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

_CUTOFF_OF_KNOWN, _CUTOFF_OF_MISSING, _CUTOFF_OF_ARGUMENTS = 0.8, 0.94, 0.9
"""Minimum similarity (difflib's cutoff) of a name that may be misspelt to a known name of the framework, to a name that
was read but is missing from the file, and of an argument where the user's program has arguments of its own."""
MAX_FREE_NAMES = 12
"""Maximum number of harmless settings that the terminal lists; a log has hundreds."""


@dataclass(frozen=True)
class Unread:
    """Entries of a file that are not in the prediction, or are known to cost nothing.

    Attributes:
        remarks: Sentences on entries that were read and are predicted differently, one per entry.
        unknown: Names of entries that are not in the prediction.
        free: Names of entries that are known to cost neither time nor memory.
        strange: Those of `unknown` that may be misspelt -> the nearest known name, empty if there is none.
        framework: The framework's name in sentences.
    """

    remarks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    strange: Mapping[str, str] = field(default_factory=dict)
    framework: str = ""

    @staticmethod
    def from_reader(reader: SettingsReader, remarks: Iterable[str]) -> Unread:
        """The entries that were not read, after the remarks were generated, which read further entries.

        Raises:
            InputError: if an entry is a table but should be a value, or the other way round.
        """
        sentences = tuple(remarks)
        reader.check_tables()
        unasked = sorted(reader.unasked)
        settings, unused = reader.settings, reader.unused
        free = tuple(name for name in unasked if name in unused or is_harmless(name, settings[name], reader.harmless))
        unknown, missing = tuple(name for name in unasked if name not in free), reader.missing
        near = {name: get_close_matches(name, missing, 1, cutoff=_CUTOFF_OF_MISSING) for name in unknown}
        return Unread(sentences, unknown, free, {name: matches[0] for name, matches in near.items() if matches})

    def checked(self, known: Collection[str], framework: str) -> Unread:
        """The entries, with arguments that the framework's parser does not know marked as strange.

        Args:
            known: The names of all arguments.
            framework: The framework's name in sentences.
        """
        strange = {name: _nearest(name, known) for name in self.unknown if name.startswith("--") and name not in known}
        return replace(self, strange=strange, framework=framework)

    def with_misspelt(
        self, known: Collection[str], framework: str, complete: str = "", *, own_arguments: bool = False
    ) -> Unread:
        """The entries, with those near a known name, and those that the framework cannot have, marked as strange.

        Args:
            known: The names of the framework's entries.
            framework: The framework's name in sentences.
            complete: Name patterns of entries for which `known` is complete, separated by blanks; if there are any,
                `known` also has every section.
            own_arguments: Whether the user's program may have further arguments (`--name`).
        """
        if not known:
            return self
        patterns, sections = complete.split(), {name.partition(".")[0] for name in known}

        def is_unknown(name: str) -> bool:
            return name not in known and any(fnmatchcase(name, pattern) for pattern in patterns)

        # If the known names are complete, a name near a known one is misspelt even in a harmless section.
        near = misspelt(self.free, known, own_arguments=own_arguments) if patterns else {}
        free = tuple(name for name in self.free if not (name in near or is_unknown(name)))
        unknown = tuple(sorted({*self.unknown, *self.free} - {*free}))
        impossible = (
            name for name in unknown
            if is_unknown(name) or (patterns and name[0] != "-" and name.partition(".")[0] not in sections)
        )  # fmt: skip
        of_known = misspelt(unknown, known, own_arguments=own_arguments)
        strange = {**dict.fromkeys(impossible, ""), **self.strange, **of_known}
        return replace(self, unknown=unknown, free=free, strange=strange, framework=self.framework or framework)

    @property
    def not_predicted(self) -> int:
        """The number of entries that are not in the prediction or are predicted differently."""
        return len(self.remarks) + len(self.unknown)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence on entries that may be misspelt, if there are any."""
        near = misspelt_words(self.strange)
        whose = f"Not known to {self.framework}, misspelt or of a fork" if self.framework else "Perhaps misspelt"
        return (f"{whose}, and not in the prediction: {near}.",) if near else ()

    def sentences(self, max_names: int | None = None) -> Iterator[str]:
        """Sentences on all entries except those in the warnings, the remarks first.

        Args:
            max_names: Maximum number of harmless entries to list; None: all.
        """
        yield from self.remarks
        if forks := tuple(name for name, near in self.strange.items() if not near):
            yield f"Not known to {self.framework}, and not in the prediction: {_joined_names(forks)}."
        if unknown := tuple(name for name in self.unknown if name not in self.strange):
            yield f"Not in the prediction: {_joined_names(unknown)}."
        if self.free:
            yield f"Known to cost neither time nor memory: {_joined_names(self.free, max_names)}."


@cache
def known_entries(framework: str) -> frozenset[str]:
    """The names of all entries and arguments that a framework has or had; empty if there is no list."""
    arguments = (f"--{name}" for name in listed_names(framework, "arguments.txt"))
    entries = (name for file in ("entries.txt", "accelerate.txt") for name in listed_names(framework, file))
    return frozenset((*entries, *arguments))


@cache
def listed_names(framework: str, file: str) -> frozenset[str]:
    """The names in a file of a framework's folder (tools/framework_entries.py); empty if there is no such file."""
    path = resources.files(f"debubble.frameworks.{framework}").joinpath(file)
    return frozenset(path.read_text().split()) if path.is_file() else frozenset()


def misspelt(names: Iterable[str], known: Collection[str], *, own_arguments: bool = False) -> dict[str, str]:
    """Entries that a framework does not know -> the nearest entry that it knows, for those that have one.

    Args:
        names: The entries' names.
        known: The names of the framework's entries.
        own_arguments: Whether the user's program may have further arguments (`--name`).
    """
    strange = (name for name in names if name not in known and name.removeprefix("--") not in known)
    near = ((name, _nearest(name, known, own_arguments=own_arguments)) for name in strange)
    return {name: nearest for name, nearest in near if nearest}


def _nearest(name: str, known: Collection[str], *, own_arguments: bool = False) -> str:
    """The known name that is nearest as a whole, in its section and in its last component; empty if there is none."""
    section, _, last = name.rpartition(".")
    is_argument = name.startswith("--")
    cutoff = _CUTOFF_OF_ARGUMENTS if own_arguments and is_argument else _CUTOFF_OF_KNOWN
    candidates = [other for other in known if other.startswith("--") == is_argument]
    for candidate in get_close_matches(name, candidates, 5, cutoff=cutoff):
        of_section, _, of_last = candidate.rpartition(".")
        if _is_near(section, of_section) and _is_near(last, of_last):
            return candidate
    return ""


def _is_near(word: str, other: str) -> bool:
    return word == other or SequenceMatcher(a=other, b=word).ratio() >= _CUTOFF_OF_KNOWN


def with_misspelt_first(
    error: InputError, reader: SettingsReader, known: Collection[str], *, own_arguments: bool = False
) -> InputError:
    """An error on a file, preceded by the entries that may be misspelt and may have caused it.

    Args:
        error: The error.
        reader: The file's settings.
        known: The names of the framework's entries.
        own_arguments: Whether the user's program may have further arguments (`--name`).
    """
    costly = (name for name, value in reader.settings.items() if not is_harmless(name, value, reader.harmless))
    near = misspelt_words(misspelt(costly, known, own_arguments=own_arguments))
    return InputError(f"{reader.path} has {near}.  {error}") if near else error


def misspelt_words(strange: Mapping[str, str]) -> str:
    """The misspelt entries, each followed by `(did you mean NAME?)`."""
    return ", ".join(f"{name} (did you mean {near}?)" for name, near in strange.items() if near)


def _joined_names(names: tuple[str, ...], max_names: int | None = None) -> str:
    more = "" if max_names is None or len(names) <= max_names else f" and {len(names) - max_names} more"
    return f"{' '.join(names[:max_names])}{more}"
