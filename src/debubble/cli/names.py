"""Arguments and options that take registered names, or unique prefixes of them, with shell completion."""

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
"""A function that looks up the known names when they are needed."""


def name_option(
    names: Names,
    *declarations: str,
    noun: str,
    help: str,
    metavar: str | None = None,
    several: bool = False,
    section: str | None = None,
    loader: str | None = None,
) -> Any:
    """Declare an option that takes one of these names.

    Args:
        names: The known names.
        declarations: The option's names, if they differ from the parameter's.
        noun: The word for such a name in errors.
        help: The help text.
        metavar: The name of the value in the help.
        several: Whether it takes lists of names, optionally with numbers, as `1f1b,interleaved:4`.
        section: The option's section of the help.
        loader: The function, `module:attribute`, that registers an entry of a user's file; None: not supported.
    """
    taken = _one_of(names, noun, several=several, loader=loader)
    return typer.Option(*declarations, help=help, metavar=metavar, rich_help_panel=section, **taken)


def name_argument(names: Names, *, noun: str, help: str, metavar: str | None = None) -> Any:
    """Declare an argument that takes one of these names; see `name_option`."""

    def read(value: str) -> str:
        try:
            return full_name(value, names(), kind=noun)
        except InputError as error:
            if not Path(value).is_file():
                raise
            known = ", ".join(sorted(names()))
            raise InputError(f"{value} is a file: give the {noun} before it, one of {known}.") from error

    return typer.Argument(help=help, metavar=metavar, callback=read, autocompletion=completion(names))


def _one_of(names: Names, noun: str, *, several: bool = False, loader: str | None = None) -> dict[str, Any]:
    """The parser, which resolves prefixes of names, and the completion of a value."""

    def read(value: str | None) -> str | None:
        if value is None:
            return None
        load: Callable[[str], str] = str if loader is None else resolve_name(f"debubble.{loader}")
        if not several:
            return full_name(load(value), names(), kind=noun)
        entries = [load(entry.strip()).partition(":") for entry in value.split(",")]
        return ",".join(f"{full_name(name.strip(), names(), kind=noun)}{colon}{n}" for name, colon, n in entries)

    return {"callback": read, "autocompletion": completion(names)}


def completion(names: Names) -> Callable[[str], list[str]]:
    """Make the shell completion: names that begin with the typed text."""

    def complete(incomplete: str) -> list[str]:
        return sorted(name for name in names() if name.startswith(incomplete))

    return complete


def names_in(place: str) -> Names:
    """Make a function that imports a mapping, `module:attribute`, and returns its names."""
    return lambda: resolve_name(f"debubble.{place}")


model_names = names_in("models:models")
optimizer_names = names_in("costs.step:MOMENTS")
dtype_names = names_in("costs.devices.speed:ELEMENT")
planner_names = names_in("planners:planners")
PLANNER_LOADER = "planners.from_file:named_planner"
"""The function that registers a planner from a user's file."""
schedule_names = names_in("schedules:schedules")
export_names = names_in("exports:exports")
import_names = names_in("imports:imports")
framework_names = names_in("targets:targets")
known_frameworks = names_in("costs.frameworks:FRAMEWORK_NAMES")
theme_names = names_in("views.palette:THEMES")
size_names = names_in("views.picture:SIZES")
answer_names = names_in("cli.answers:ANSWERS")


def learning_rate_names() -> Iterable[str]:
    """Names of the learning-rate schedules after the warm-up."""
    require_torch()
    from debubble.training.optimizer import SCHEDULES

    return SCHEDULES


def report_names() -> Iterable[str]:
    """Names of papers with reports, and `all`."""
    from debubble.papers.registry import papers

    return [*papers, "all"]


def cluster_completion(incomplete: str) -> list[str]:
    """Complete a cluster's device after its count and `x`."""
    from debubble.costs import hardware

    number, times, _ = incomplete.rpartition("x")
    return completion(lambda: (f"{number or 8}{times or 'x'}{name}" for name in hardware))(incomplete)


Theme = Annotated[str, name_option(theme_names, noun="theme", help="Colours of the pictures: light or dark.")]
Size = Annotated[
    str,
    name_option(
        size_names,
        noun="size",
        help="Width and fonts of the pictures: slide, page (both columns of a paper) or column.",
    ),
]
