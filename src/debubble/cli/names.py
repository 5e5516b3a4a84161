"""Arguments and options that take a name: itself or a beginning that only one name has, completion by the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from debubble.cli.app import require_torch
from debubble.errors import InputError
from debubble.registry import full_name

Names = Callable[[], Iterable[str]]
"""The names that there are, which are looked up when they are needed."""


def name_option(
    names: Names,
    *declarations: str,
    what: str,
    help: str,
    metavar: str | None = None,
    several: bool = False,
    section: str | None = None,
    own: str | None = None,
) -> Any:
    """An option that takes one of these names.

    Args:
        names: Those that there are.
        declarations: The option's own names, if they are not its parameter's.
        what: The word for one of them, in errors.
        help: What the help says.
        metavar: How the help writes its value.
        several: Whether it takes a list too, each name with a number or not, as `1f1b,interleaved:4`.
        section: The section of the help in which it stands.
        own: The function, `module:attribute`, that names one of the user's own (None: there are none).
    """
    taken = _one_of(names, what, several=several, own=own)
    return typer.Option(*declarations, help=help, metavar=metavar, rich_help_panel=section, **taken)


def name_argument(names: Names, *, what: str, help: str, metavar: str | None = None) -> Any:
    """An argument that takes one of these names; see `name_option`."""

    def read(value: str) -> str:
        try:
            return full_name(value, names(), kind=what)
        except InputError as error:
            if not Path(value).is_file():
                raise
            known = ", ".join(sorted(names()))
            raise InputError(f"{value} is a file: give the {what} before it, one of {known}.") from error

    return typer.Argument(help=help, metavar=metavar, callback=read, autocompletion=completion(names))


def _one_of(names: Names, what: str, *, several: bool = False, own: str | None = None) -> dict[str, Any]:
    """Parser and completion of a value, read as the name that it is or begins (None: it was not given)."""

    def read(value: str | None) -> str | None:
        if value is None or not several:
            return value and full_name(value, names(), kind=what)
        name_of_own: Callable[[str], str] = str if own is None else resolve_name(f"debubble.{own}")
        parts = [name_of_own(part.strip()).partition(":") for part in value.split(",")]
        return ",".join(f"{full_name(name.strip(), names(), kind=what)}{colon}{n}" for name, colon, n in parts)

    return {"callback": read, "autocompletion": completion(names)}


def completion(names: Names) -> Callable[[str], list[str]]:
    """The completion of a shell: the names that begin with what was typed."""

    def complete(incomplete: str) -> list[str]:
        return sorted(name for name in names() if name.startswith(incomplete))

    return complete


def names_in(place: str) -> Names:
    """The names in a mapping, `module:attribute`, which is imported when they are needed."""
    return lambda: resolve_name(f"debubble.{place}")


model_names = names_in("models:models")
optimizer_names = names_in("costs.step:MOMENTS")
dtype_names = names_in("costs.devices.speed:ELEMENT")
planner_names = names_in("planners:planners")
schedule_names = names_in("schedules:schedules")
export_names = names_in("exports:exports")
import_names = names_in("imports:imports")
framework_names = names_in("targets:targets")
known_frameworks = names_in("costs.frameworks:FRAMEWORK_NAMES")
theme_names = names_in("views.palette:THEMES")
size_names = names_in("views.picture:SIZES")
answer_names = names_in("cli.answers:ANSWERS")


def learning_rate_names() -> Iterable[str]:
    """Names of the ways in which the learning rate continues after the warm-up."""
    require_torch()
    from debubble.training.optimizer import SCHEDULES

    return SCHEDULES


def report_names() -> Iterable[str]:
    """Papers whose tables are computed, and all of them."""
    from debubble.papers.registry import papers

    return [*papers, "all"]


def cluster_completion(incomplete: str) -> list[str]:
    """The completion of a cluster: known devices, after the number and the `x` that were typed."""
    from debubble.costs import hardware

    number, times, _ = incomplete.rpartition("x")
    return completion(lambda: (f"{number or 8}{times or 'x'}{name}" for name in hardware))(incomplete)


Theme = Annotated[str, name_option(theme_names, what="theme", help="Colours of the pictures: light or dark.")]
Size = Annotated[
    str,
    name_option(
        size_names,
        what="size",
        help="Width and fonts of the pictures: slide, page (both columns of a paper) or column.",
    ),
]
