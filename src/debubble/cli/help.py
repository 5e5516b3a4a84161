"""Help in sections, and commands and options by the beginning of their name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from debubble.cli.job_file import PLACES, with_job_file
from debubble.errors import InputError
from debubble.registry import full_name

Sections = dict[str, list[tuple[str, str]]]
"""Title -> rows of a name and its explanation."""


_LIST = re.compile(r"<list\[(\w+)\]>")
"""The type of what may be given several times, as the parser writes it."""


class SectionedCommand(TyperCommand):
    """A command whose help lists its options under the titles that they were given (`rich_help_panel`).

    An option is called by its name or by a beginning that no other has.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, with the names of options written out."""
        with _refusals_as_input_errors(ctx):
            parameters = self.get_params(ctx)
            whole = _whole_options(args, parameters)
            _refuse_empty_paths(whole, parameters)
            return super().parse_args(ctx, with_job_file(whole, ctx, parameters))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a list for each title; options without one come last."""
        sections: Sections = {"Arguments": []}
        others = []
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            title = getattr(parameter, "rich_help_panel", None)
            if row is None:
                continue
            row = _LIST.sub(lambda found: f"<{found[1].lower()}>", row[0]), row[1]
            if parameter.param_type_name == "argument":
                sections["Arguments"].append(row)
            elif title is None:
                others.append(row)
            else:
                sections.setdefault(title, []).append(row)
        _write(formatter, {**sections, "Options": others})


class CommandGroup(TyperGroup):
    """Commands under titles, each called by its name or by a beginning that no other has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments, with the names of options in front of the command written out."""
        end = next((at for at, argument in enumerate(args) if not argument.startswith("-")), len(args))
        whole = [*_whole_options(args[:end], self.get_params(ctx)), *args[end:]]
        if not whole:  # the parser answers this call with the help
            return super().parse_args(ctx, whole)
        with _refusals_as_input_errors(ctx):
            return super().parse_args(ctx, whole)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or the only one that begins so.

        Raises:
            InputError: If there is none, or there are several.
        """
        if cmd_name.startswith("-") or ctx.resilient_parsing:
            return super().get_command(ctx, cmd_name)
        return super().get_command(ctx, full_name(cmd_name, sorted(self.commands), kind="command"))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list for each title, in the order of `TITLES`."""
        sections: Sections = {title: [] for title in TITLES}
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None)
            row = name, command.get_short_help_str(formatter.width - 15)
            sections.setdefault(title if isinstance(title, str) else "More", []).append(row)
        _write(formatter, sections)


TITLES = ("Plan", "Look", "Run", "Take along", "Lists")


_UsageError: Any = typer.BadParameter.__base__
"""The errors that the parser raises for a call that it refuses."""


@contextmanager
def _refusals_as_input_errors(ctx: Any) -> Iterator[None]:
    """Raise the parser's refusals as InputErrors of one sentence, without the usage in front of it."""
    try:
        yield
    except _UsageError as error:
        place = ctx.meta.get(PLACES, {}).get(getattr(getattr(error, "param", None), "name", None))
        taken = _taken(error)
        if place is not None:
            raise InputError(f"{place}: {taken or error.message.rstrip('.')}.") from None
        if taken is not None:
            raise InputError(f"{error.param.opts[-1]} {taken}.") from None
        raise InputError(f"{_read_as(ctx)}{error.format_message().rstrip('.')}; see `{ctx.command_path} -h`.") from None


def _read_as(ctx: Any) -> str:
    """The beginning of a refusal that says which command was understood, if its name was written in part."""
    said, whole = ctx.info_name, ctx.command.name
    if ctx.parent is None or said == whole:
        return ""
    meant = next((f" (did you mean '{name}'?)" for name in ctx.parent.command.commands if said.startswith(name)), "")
    return f"'{said}' is read as '{whole}'{meant}: "


TAKEN = {
    "int_parsing": "takes whole numbers",
    "float_parsing": "takes numbers",
    "less_than_equal": "must be at most {le:g}",
    "greater_than_equal": "must be at least {ge:g}",
}
"""The values that an option takes, by the parser's name of the error."""


def _taken(error: Any) -> str | None:
    """The values that an option takes in place of the number that it was given; None: the error is another."""
    cause = error.__cause__
    found = cause.errors()[0] if hasattr(cause, "errors") and getattr(error, "param", None) is not None else {}
    words = TAKEN.get(found.get("type", ""))
    return None if words is None else f"{words.format(**found.get('ctx', {}))}, not {found['input']}"


def _whole_options(arguments: list[str], parameters: list[Any]) -> list[str]:
    """The arguments with the whole names of long options; their values, and all after `--`, stay."""
    flags = {name: getattr(each, "is_flag", True) for each in parameters for name in (*each.opts, *each.secondary_opts)}
    long = [name for name in flags if name.startswith("--")]
    whole: list[str] = []
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if argument == "--":
            return [*whole, argument, *left]
        if name.startswith("--"):
            name = full_name(name, long, kind="option")
        whole.append(name + equals + value)
        if not equals and not flags.get(name, True):
            whole += islice(left, 1)
    return whole


def _refuse_empty_paths(arguments: list[str], parameters: list[Any]) -> None:
    """Refuse an option whose path is empty, which would be the working directory."""
    paths = [each for each in parameters if each.type_descriptor.annotation in (Path, list[Path])]
    names = {name for each in paths for name in each.opts if name.startswith("-")}
    given = [(name, value) for name, equals, value in (argument.partition("=") for argument in arguments) if equals]
    for name, value in (*given, *pairwise(arguments)):
        if name in names and not value:
            raise InputError(f"{name} is empty: give a path, or leave {name} out.")


def _write(formatter: Any, sections: Sections) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
