"""Click classes with help in sections, and with commands and options by unique prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from debubble.cli.job_file import ENTRY_SOURCES, JOB_COMMANDS, with_job_file
from debubble.errors import InputError
from debubble.registry import full_name

Sections = dict[str, list[tuple[str, str]]]
"""Rows of (name, explanation) by section title."""


_LIST_TYPE = re.compile(r"<list\[(\w+)\]>")
"""The type of repeatable arguments in the parser's help."""


class SectionedCommand(TyperCommand):
    """A command whose help lists options by section (`rich_help_panel`), and whose options accept unique prefixes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, after expanding option prefixes and job files."""
        with _usage_errors_as_input_errors(ctx):
            parameters = self.get_params(ctx)
            _refuse_foreign_options(args, ctx, parameters)
            expanded = _expanded_options(args, parameters)
            _refuse_empty_paths(expanded, parameters)
            return super().parse_args(ctx, with_job_file(expanded, ctx, parameters))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a list per section; options without one come last."""
        sections: Sections = {"Arguments": []}
        untitled = []
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            title = getattr(parameter, "rich_help_panel", None)
            if row is None:
                continue
            row = _LIST_TYPE.sub(lambda match: f"<{match[1].lower()}>", row[0]), row[1]
            if parameter.param_type_name == "argument":
                sections["Arguments"].append(row)
            elif title is None:
                untitled.append(row)
            else:
                sections.setdefault(title, []).append(row)
        _write(formatter, {**sections, "Options": untitled})


class CommandGroup(TyperGroup):
    """A group that lists commands by section and accepts unique prefixes of their names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, after expanding prefixes of options before the command."""
        end = next((index for index, argument in enumerate(args) if not argument.startswith("-")), len(args))
        expanded = [*_expanded_options(args[:end], self.get_params(ctx)), *args[end:]]
        if not expanded:  # the parser then prints the help
            return super().parse_args(ctx, expanded)
        with _usage_errors_as_input_errors(ctx):
            return super().parse_args(ctx, expanded)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name or unique prefix.

        Raises:
            InputError: If no command or several match.
        """
        if cmd_name.startswith("-") or ctx.resilient_parsing:
            return super().get_command(ctx, cmd_name)
        return super().get_command(ctx, full_name(cmd_name, sorted(self.commands), kind="command"))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list per section, in the order of `TITLES`."""
        sections: Sections = {title: [] for title in TITLES}
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None)
            row = name, command.get_short_help_str(formatter.width - 15)
            sections.setdefault(title if isinstance(title, str) else "More", []).append(row)
        _write(formatter, sections)


TITLES = ("Plan", "Look", "Run", "Take along", "Lists")


_UsageError: Any = typer.BadParameter.__base__
"""The parser's errors for wrong calls."""


@contextmanager
def _usage_errors_as_input_errors(ctx: Any) -> Iterator[None]:
    """Convert the parser's usage errors into InputErrors of one sentence."""
    try:
        yield
    except _UsageError as error:
        source = ctx.meta.get(ENTRY_SOURCES, {}).get(getattr(getattr(error, "param", None), "name", None))
        rule = _value_rule(error)
        if source is not None:
            raise InputError(f"{source}: {rule or error.message.rstrip('.')}.") from None
        if rule is not None:
            raise InputError(f"{error.param.opts[-1]} {rule}.") from None
        raise InputError(f"{_read_as(ctx)}{error.format_message().rstrip('.')}; see `{ctx.command_path} -h`.") from None


def _read_as(ctx: Any) -> str:
    """A prefix for error messages that names the command if it was called by a prefix."""
    said, full = ctx.info_name, ctx.command.name
    if ctx.parent is None or said == full:
        return ""
    meant = next((f" (did you mean '{name}'?)" for name in ctx.parent.command.commands if said.startswith(name)), "")
    return f"'{said}' is read as '{full}'{meant}: "


VALUE_RULES = {
    "int_parsing": "takes whole numbers",
    "float_parsing": "takes numbers",
    "less_than_equal": "must be at most {le:g}",
    "greater_than_equal": "must be at least {ge:g}",
}
"""Words for accepted values, by the parser's error type."""


def _value_rule(error: Any) -> str | None:
    """Words for the values that an option accepts, for errors about numbers; None for other errors."""
    cause = error.__cause__
    details = cause.errors()[0] if hasattr(cause, "errors") and getattr(error, "param", None) is not None else {}
    words = VALUE_RULES.get(details.get("type", ""))
    return None if words is None else f"{words.format(**details.get('ctx', {}))}, not {details['input']}"


def _expanded_options(arguments: list[str], parameters: list[Any]) -> list[str]:
    """Expand prefixes of long options; values, and arguments after `--`, are unchanged."""
    flags = {name: getattr(p, "is_flag", True) for p in parameters for name in (*p.opts, *p.secondary_opts)}
    long = [name for name in flags if name.startswith("--")]
    expanded: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if argument == "--":
            return [*expanded, argument, *remaining]
        if name.startswith("--"):
            name = full_name(name, long, kind="option")
        expanded.append(name + equals + value)
        if not equals and not flags.get(name, True):
            expanded += islice(remaining, 1)
    return expanded


def _refuse_foreign_options(arguments: list[str], ctx: Any, parameters: list[Any]) -> None:
    """Raise InputError for an option that only other commands have, with their names."""
    options = [name for p in parameters for name in (*p.opts, *p.secondary_opts)]
    for argument in takewhile("--".__ne__, arguments):
        name = argument.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in options):
            commands = [f"`{command}`" for command in JOB_COMMANDS if name[2:] in ctx.obj([command])]
            if commands:
                have = " and ".join(commands) + (" has" if len(commands) == 1 else " have")
                raise InputError(f"`{ctx.command.name}` has no option '{name}', which {have}.")


def _refuse_empty_paths(arguments: list[str], parameters: list[Any]) -> None:
    """Raise InputError for an option with an empty path, which would mean the working directory."""
    paths = [p for p in parameters if p.type_descriptor.annotation in (Path, list[Path])]
    names = {name for p in paths for name in p.opts if name.startswith("-")}
    joined = [(name, value) for name, equals, value in (argument.partition("=") for argument in arguments) if equals]
    for name, value in (*joined, *pairwise(arguments)):
        if name in names and not value:
            raise InputError(f"{name} is empty: give a path, or leave {name} out.")


def _write(formatter: Any, sections: Sections) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
