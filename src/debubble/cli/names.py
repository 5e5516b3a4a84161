"""Arguments and options that take a name: itself or a beginning that only one name has, completed by the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import Any

import typer

from debubble.cli.app import require_torch
from debubble.registry import full_name

Names = Callable[[], Iterable[str]]
"""The names that there are, which are looked up when they are needed."""


def name_option(names: Names, *declarations: str, what: str, help: str, metavar: str | None = None) -> Any:
    """An option that takes one of these names.

    Args:
        names: Those that there are.
        declarations: The option's own names, if they are not its parameter's.
        what: The word for one of them, in errors.
        help: What the help says.
        metavar: How the help writes its value.
    """
    whole, offered = whole_name(names, what), completed(names)
    return typer.Option(*declarations, help=help, metavar=metavar, callback=whole, autocompletion=offered)


def name_argument(names: Names, *, what: str, help: str, metavar: str | None = None) -> Any:
    """An argument that takes one of these names; see `name_option`."""
    return typer.Argument(help=help, metavar=metavar, callback=whole_name(names, what), autocompletion=completed(names))


def whole_name(names: Names, what: str) -> Callable[[str | None], str | None]:
    """How a value is read: the one of these names that it is, or begins; one that was not given stays None."""

    def whole(value: str | None) -> str | None:
        return None if value is None else full_name(value, names(), what=what)

    return whole


def completed(names: Names) -> Callable[[str], list[str]]:
    """What a shell offers: the names that begin with what was typed."""

    def offered(incomplete: str) -> list[str]:
        return sorted(name for name in names() if name.startswith(incomplete))

    return offered


def registered(place: str) -> Names:
    """The names in a mapping, `module:attribute`, which is imported when they are needed."""
    return lambda: resolve_name(f"debubble.{place}")


model_names = registered("models:models")
optimizer_names = registered("costs.step:MOMENTS")
dtype_names = registered("costs.speed:ELEMENT")
planner_names = registered("planners:planners")
schedule_names = registered("schedules:schedules")
export_names = registered("exports:exports")
import_names = registered("imports:imports")
framework_names = registered("targets:targets")
theme_names = registered("views.palette:THEMES")
size_names = registered("views.picture:SIZES")
answer_names = registered("cli.answers:ANSWERS")


def learning_rate_names() -> Iterable[str]:
    """What the learning rate does after the warm-up."""
    require_torch()
    from debubble.training.optimizer import SCHEDULES

    return SCHEDULES


def report_names() -> Iterable[str]:
    """Papers whose tables are computed, and all of them."""
    from debubble.reproduce import papers

    return [*papers, "all"]


def offered_clusters(incomplete: str) -> list[str]:
    """What a shell offers for a cluster: known devices, behind the number and the `x` that were typed."""
    from debubble.costs import hardware

    number, times, _ = incomplete.rpartition("x")
    return completed(lambda: (f"{number or 8}{times or 'x'}{name}" for name in hardware))(incomplete)
