"""A registry: names -> members, found by importing every module of a folder when first asked.

Adding a schedule, planner, view or exporter is adding one file with a decorated function, or a folder whose
`__init__.py` imports it; other modules of that folder are loaded when they are needed.  Planners and schedules of the
papers are loaded from `debubble.papers`, and what belongs to a framework from `debubble.frameworks`, where each has a
folder with modules of fixed names.  Other distributions add theirs by an entry point in the group of the folder's name,
whose module registers them when it is imported:

    [project.entry-points."debubble.schedules"]
    mine = "my_package.my_schedule"
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import pkgutil
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from debubble.errors import DebubbleError, InputError, PluginError

T = TypeVar("T")

PAPERS, FRAMEWORKS = "debubble.papers", "debubble.frameworks"
"""The packages with a folder per paper and per framework.  They import the registries, which know only their names."""


def full_name(name: str, names: Iterable[str], *, kind: str) -> str:
    """Resolve a name: an exact match, or the only name with it as a prefix, in any case.

    Raises:
        InputError: If several names match, or none does.
    """
    known = tuple(names)
    if name in known:
        return name
    if (kind, name.lower()) in _OTHER_METHODS:
        raise InputError(f"There is no {kind} '{name}', which {_OTHER_METHODS[kind, name.lower()]}.")
    matches = [candidate for candidate in known if name and candidate.lower().startswith(name.lower())]
    if len(matches) > 1:
        raise InputError(f"'{name}' may be {', '.join(matches[:-1])} or {matches[-1]}: write more of it.")
    if not matches:
        raise unknown_name(name, known, kind=kind)
    return matches[0]


def unknown_name(name: str, names: Iterable[str], *, kind: str) -> InputError:
    """The error for an unknown name: it suggests similar names, or lists all of them or the command that does."""
    known = {candidate.lower(): candidate for candidate in names}
    meant = _MEANT.get((kind, str(name).lower()))
    if meant in known:
        return InputError(f"There is no {kind} '{name}', which is a schedule; did you mean '{meant}'?")
    other, package, call = _OTHER_KINDS.get(kind, ("", "", ""))
    members: Iterable[str] = vars(importlib.import_module(package))[f"{other}s"] if package else ()
    if (member := str(name).lower()) in members:
        return InputError(f"There is no {kind} '{name}', which is a {other}: `debubble {call} {member}`.")
    listed = _LISTS[kind] if kind in _LISTS else f"there are: {', '.join(known.values())}."
    close = [known[candidate] for candidate in _similar(str(name).lower(), known)]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else listed
    return InputError(f"There is no {kind} '{name}'; {hint}")


def _similar(name: str, names: Iterable[str]) -> list[str]:
    """Up to three names that are similar to one, that contain it, or whose first word is similar to it."""
    known = [*names]
    name = re.sub("zero-?bubble", "zb", name)
    if close := difflib.get_close_matches(name, known, n=MAX_SUGGESTIONS):
        return close
    if len(name) >= MIN_SUBSTRING_LENGTH and (containing := [candidate for candidate in known if name in candidate]):
        return containing[:MAX_SUGGESTIONS]
    heads = difflib.get_close_matches(name, dict.fromkeys(n.partition("-")[0] for n in known), n=1)
    return [candidate for candidate in known if candidate.partition("-")[0] in heads][:MAX_SUGGESTIONS]


MAX_SUGGESTIONS = 3
"""Maximum names that an error suggests in place of an unknown one."""
MIN_SUBSTRING_LENGTH = 3
"""Minimum letters of an unknown name to suggest names that contain it."""
_LISTS = {
    "device": "see `debubble hardware`.",
    "model": "see `debubble models`.",
    "model or file": "see `debubble models`.",
    "option": "`-h` lists them.",
}
"""Kind with too many names for a sentence -> where they are listed."""
_MEANT = {("planner", schedule): "megatron-even" for schedule in ("1f1b", "gpipe", "interleaved", "interleaved1f1b")}
"""(kind, name of another kind) -> the name of this kind that the user means."""
_OTHER_KINDS = {
    "schedule": ("planner", "debubble.planners", "plan --planner"),
    "planner": ("schedule", "debubble.schedules", "simulate --schedule"),
}
"""Kind -> a kind that is taken for it, the package of its members, and the call that takes their names."""

_TRAINERS = ("accelerate", "axolotl", "llama-factory", "llamafactory", "transformers", "trl")
_OTHER_METHODS = {
    ("schedule", "dualpipe"): "keeps two copies of the parameters; 'dualpipe-v' needs one",
    **{
        ("framework", name): "starts DeepSpeed or FSDP; take 'deepspeed', whose configuration it passes on"
        for name in _TRAINERS
    },
}
"""(kind, published name that is not supported) -> what it does, and what to use instead."""


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to members, which the modules of `package` register when they are imported.

    Args:
        package: The package; it is imported at the first access, and so are its entry points.
        kind: The word for a member in messages.
        folders: Another package, and the name of the module in its folders that registers further members.
        order: Names that come first, in this order; all others follow in the order of registration.
    """

    def __init__(
        self, package: str, *, kind: str, folders: tuple[str, str] | None = None, order: Sequence[str] = ()
    ) -> None:
        self._package = package
        self._kind = kind
        self._folders = folders
        self._order = {name: index for index, name in enumerate(order)}
        self._members: dict[str, T] = {}
        self._loaded = self._loading = False
        self._broken: dict[str, InputError] = {}
        """Name of an entry point that cannot be loaded -> the error."""
        self._stale: set[str] = set()
        """Names registered by an import that failed; a retry may register them again."""
        # Reentrant, as a module of the package may access its registry while it is imported.
        self._lock = threading.RLock()

    def add(self, name: str, member: T) -> T:
        """Register a member under a new name, and return it."""
        taken = name in self._members and name not in self._stale
        assert not taken, f"The {self._kind} '{name}' is registered already: by {self._members[name]}."
        self._members[name] = member
        return member

    def __getitem__(self, name: str) -> T:
        self._load()
        if name not in self._members:
            raise self._broken.get(name) or unknown_name(name, self._members, kind=self._kind)
        return self._members[name]

    def full_name(self, name: str) -> str:
        """Resolve a member's name or a unique prefix of it.

        Raises:
            InputError: If no member matches, or several do.
        """
        return full_name(name, self, kind=self._kind)

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._members)

    def __len__(self) -> int:
        self._load()
        return len(self._members)

    def _load(self) -> None:
        if self._loaded:
            return
        with self._lock:
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                for module in self._modules():
                    importlib.import_module(module)
                for entry_point in entry_points(group=self._package):
                    self._load_entry_point(entry_point)
                members = sorted(self._members.items(), key=lambda item: self._order.get(item[0], len(self._order)))
                self._members = dict(members)
                self._loaded = True
            finally:
                self._stale = set() if self._loaded else set(self._members)
                self._loading = False

    def _load_entry_point(self, entry_point: EntryPoint) -> None:
        """Import another distribution's entry point; if that fails, log a warning, and continue without it."""
        try:
            entry_point.load()
        except Exception as error:  # a plugin may raise anything
            owner = "an unknown distribution" if entry_point.dist is None else entry_point.dist.name
            sentence = (
                f"The entry point '{entry_point.name}' that {owner} adds to {entry_point.group} cannot be loaded"
                f" ({type(error).__name__}: {error}); mend it, or uninstall {owner}."
            )
            logging.getLogger("debubble").warning(sentence)
            self._broken[entry_point.name] = InputError(sentence)

    def _modules(self) -> list[str]:
        """Full names of the modules to import, sorted by the name of the module or of its folder."""
        modules = [(name, f"{self._package}.{name}") for name, _ in _contents(self._package)]
        if self._folders is not None:
            package, module_name = self._folders
            folders = [name for name, is_folder in _contents(package) if is_folder]
            in_folders = [(name, f"{package}.{name}.{module_name}") for name in folders]
            modules += [(name, module) for name, module in in_folders if importlib.util.find_spec(module)]
        return [module for _, module in sorted(modules)]


def _contents(package: str) -> list[tuple[str, bool]]:
    """The modules in a package as (name, whether it is a package)."""
    path = importlib.import_module(package).__path__
    return [(module.name, module.ispkg) for module in pkgutil.iter_modules(path)]


def is_own(function: Callable[..., object]) -> bool:
    """True if a function is debubble's, and not another distribution's."""
    return function.__module__.partition(".")[0] == "debubble"


@contextmanager
def guarding_plugins(function: Callable[..., object], *, name: str) -> Iterator[None]:
    """Turn exceptions of another distribution's function into a PluginError that says where it failed.

    Args:
        function: The function that is called inside.
        name: A phrase for it in the message.
    """
    try:
        yield
    except DebubbleError:
        raise
    except Exception as error:
        if is_own(function):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__}{f': {error}' * bool(str(error))}"
        raise PluginError(f"{name} fails at {Path(place.filename).name}, line {place.lineno} ({words}).") from error


class _Folder(ModuleType, Mapping[str, Any]):
    """A package that can be indexed like the registry with its name."""

    # Modules are compared and hashed by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Any:
        return self._registry[name]

    def __contains__(self, name: object) -> bool:
        return name in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    @property
    def _registry(self) -> Registry[Any]:
        registry: Registry[Any] = self.__dict__[self.__name__.rpartition(".")[2]]
        return registry


def index_by_name(package: str) -> None:
    """Make `debubble.schedules["1f1b"]` work although importing the package makes that attribute a module."""
    sys.modules[package].__class__ = _Folder
