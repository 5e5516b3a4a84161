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
"""The packages with one folder per paper and per framework.  They import the registries, which know them by name."""


def full_name(name: str, names: Iterable[str], *, what: str) -> str:
    """The one of these names that is meant: the same, or the only one that begins so, in capitals or not.

    Raises:
        InputError: If several begin so, or none does.
    """
    known = tuple(names)
    if name in known:
        return name
    if (what, name.lower()) in _OTHER_METHODS:
        raise InputError(f"There is no {what} '{name}', which {_OTHER_METHODS[what, name.lower()]}.")
    beginning = [each for each in known if name and each.lower().startswith(name.lower())]
    if len(beginning) > 1:
        raise InputError(f"'{name}' may be {', '.join(beginning[:-1])} or {beginning[-1]}: write more of it.")
    if not beginning:
        raise unknown_name(name, known, what=what)
    return beginning[0]


def unknown_name(name: str, names: Iterable[str], *, what: str) -> InputError:
    """The error for a name that is none of these, with those like it, or with all of them or the command for them."""
    known = {each.lower(): each for each in names}
    meant = _MEANT.get((what, str(name).lower()))
    if meant in known:
        return InputError(f"There is no {what} '{name}', which is a schedule; did you mean '{meant}'?")
    listed = f"see `debubble {_COMMANDS[what]}`." if what in _COMMANDS else f"there are: {', '.join(known.values())}."
    close = [known[each] for each in _like(str(name).lower(), known)]
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else listed
    return InputError(f"There is no {what} '{name}'; {hint}")


def _like(name: str, names: Iterable[str]) -> list[str]:
    """Up to three names that are like one, that contain it, or whose part before the first dash is like it."""
    known = [*names]
    name = re.sub("zero-?bubble", "zb", name)
    if close := difflib.get_close_matches(name, known, n=MAX_SUGGESTIONS):
        return close
    if len(name) >= MIN_PART_LENGTH and (within := [each for each in known if name in each]):
        return within[:MAX_SUGGESTIONS]
    heads = difflib.get_close_matches(name, dict.fromkeys(each.partition("-")[0] for each in known), n=1)
    return [each for each in known if each.partition("-")[0] in heads][:MAX_SUGGESTIONS]


MAX_SUGGESTIONS = 3
"""Names that are offered in place of an unknown one."""
MIN_PART_LENGTH = 3
"""Letters from which a part of a name is looked for."""
_COMMANDS = {"device": "hardware", "model": "models", "model or file": "models"}
"""Kinds of which there are too many to list -> the command that does."""
_MEANT = {("planner", schedule): "megatron-even" for schedule in ("1f1b", "gpipe", "interleaved", "interleaved1f1b")}
"""A kind and a name that is of another kind -> the one of the kind that is meant."""

_TRAINERS = ("accelerate", "axolotl", "llama-factory", "llamafactory", "transformers", "trl")
_OTHER_METHODS = {
    ("schedule", "dualpipe"): "keeps two copies of the parameters; 'dualpipe-v' needs one",
    **{
        ("framework", name): "starts DeepSpeed or FSDP; take 'deepspeed', whose configuration it passes on"
        for name in _TRAINERS
    },
}
"""A kind and a published name that there is not -> what it does, and what there is."""


class Registry(Mapping[str, T], Generic[T]):
    """The members of `package` and of the folders of another package, by name.

    Args:
        package: The package whose modules register members when they are imported.
        what: The word for a member in messages.
        folders: A package, and the module of each of its folders that registers members too, if the folder has it.
        order: Names that come first, in this order; the others follow as they are registered.
    """

    def __init__(
        self, package: str, *, what: str, folders: tuple[str, str] | None = None, order: Sequence[str] = ()
    ) -> None:
        self._package = package
        self._what = what
        self._folders = folders
        self._order = {name: place for place, name in enumerate(order)}
        self._members: dict[str, T] = {}
        self._loaded = self._loading = False
        self._broken: dict[str, InputError] = {}
        """Name of an entry point that cannot be loaded, which is mostly the member's, and why."""
        self._again: set[str] = set()
        """Names registered by an import that failed; the next one registers some of them anew."""
        # A module of the package may look into its registry while it is imported.
        self._lock = threading.RLock()

    def add(self, name: str, member: T) -> T:
        """Register a member under a name that is not taken, and return it."""
        taken = name in self._members and name not in self._again
        assert not taken, f"The {self._what} '{name}' is registered already: by {self._members[name]}."
        self._members[name] = member
        return member

    def __getitem__(self, name: str) -> T:
        self._load()
        if name not in self._members:
            raise self._broken.get(name) or unknown_name(name, self._members, what=self._what)
        return self._members[name]

    def full_name(self, name: str) -> str:
        """The name of a member, from itself or from a beginning that only one member has.

        Raises:
            InputError: If there is no such member, or there are several.
        """
        return full_name(name, self, what=self._what)

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
                self._again = set() if self._loaded else set(self._members)
                self._loading = False

    def _load_entry_point(self, entry_point: EntryPoint) -> None:
        """Import what another distribution adds; if that fails, say which, and continue without it."""
        try:
            entry_point.load()
        except Exception as error:  # others' code, without which all else works
            owner = "an unknown distribution" if entry_point.dist is None else entry_point.dist.name
            sentence = (
                f"The entry point '{entry_point.name}' that {owner} adds to {entry_point.group} cannot be loaded"
                f" ({type(error).__name__}: {error}); mend it, or uninstall {owner}."
            )
            logging.getLogger("debubble").warning(sentence)
            self._broken[entry_point.name] = InputError(sentence)

    def _modules(self) -> list[str]:
        """Full names of the modules to import, in the order of their own names and those of folders."""
        modules = [(name, f"{self._package}.{name}") for name, _ in _contents(self._package)]
        if self._folders is not None:
            package, own = self._folders
            folders = [name for name, is_folder in _contents(package) if is_folder]
            in_folders = [(name, f"{package}.{name}.{own}") for name in folders]
            modules += [(name, module) for name, module in in_folders if importlib.util.find_spec(module)]
        return [module for _, module in sorted(modules)]


def _contents(package: str) -> list[tuple[str, bool]]:
    """Name of each module in a package, and whether it is a package itself."""
    path = importlib.import_module(package).__path__
    return [(module.name, module.ispkg) for module in pkgutil.iter_modules(path)]


def is_own(function: Callable[..., object]) -> bool:
    """True if a function is debubble's, and not another distribution's."""
    return function.__module__.partition(".")[0] == "debubble"


@contextmanager
def guarding_plugins(function: Callable[..., object], *, what: str) -> Iterator[None]:
    """Turn what a function of another distribution raises into a PluginError that says where; debubble's stays.

    Args:
        function: The function that is called inside.
        what: The words for it.
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
        raise PluginError(f"{what} fails at {Path(place.filename).name}, line {place.lineno} ({words}).") from error


class _Folder(ModuleType, Mapping[str, Any]):
    """A package that is indexed like the registry it is named after."""

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
    """Let `debubble.schedules["1f1b"]` work although importing the folder makes that attribute a module."""
    sys.modules[package].__class__ = _Folder
