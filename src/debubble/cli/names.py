"""Arguments and options that take a name: itself or a beginning that only one name has, completed by the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import typer

from debubble.cli.torch_extra import require_torch
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


def model_names() -> Iterable[str]:
    """Built-in models."""
    from debubble.models import models

    return models


def offered_clusters(incomplete: str) -> list[str]:
    """What a shell offers for a cluster: known devices, behind the number and the `x` that were typed."""
    from debubble.costs import hardware

    number, times, _ = incomplete.rpartition("x")
    return completed(lambda: (f"{number or 8}{times or 'x'}{name}" for name in hardware))(incomplete)


def optimizer_names() -> Iterable[str]:
    """Optimizers whose states are known."""
    from debubble.costs.step import MOMENTS

    return MOMENTS


def dtype_names() -> Iterable[str]:
    """Data types that are priced."""
    from debubble.costs.speed import ELEMENT

    return ELEMENT


def learning_rate_names() -> Iterable[str]:
    """What the learning rate does after the warm-up."""
    require_torch()
    from debubble.training.optimizer import SCHEDULES

    return SCHEDULES


def planner_names() -> Iterable[str]:
    """Registered planners."""
    from debubble.planners import planners

    return planners


def schedule_names() -> Iterable[str]:
    """Registered schedules."""
    from debubble.schedules import schedules

    return schedules


def export_names() -> Iterable[str]:
    """Registered targets of exports."""
    from debubble.exports import exports

    return exports


def import_names() -> Iterable[str]:
    """Frameworks whose configurations are read."""
    from debubble.imports import imports

    return imports


def framework_names() -> Iterable[str]:
    """Frameworks that plans are made for."""
    from debubble.targets.target import targets

    return targets


def theme_names() -> Iterable[str]:
    """Colours of pictures."""
    from debubble.views.palette import THEMES

    return THEMES


def size_names() -> Iterable[str]:
    """Sizes of pictures."""
    from debubble.views.picture import SIZES

    return SIZES


def report_names() -> Iterable[str]:
    """Papers whose tables are computed, and all of them."""
    from debubble.reproduce import papers

    return [*papers, "all"]


def answer_names() -> Iterable[str]:
    """Commands that answer in JSON."""
    from debubble.cli.answers import ANSWERS

    return ANSWERS
