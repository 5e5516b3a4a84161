"""Help in sections, and commands by the beginning of their name."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

Sections = dict[str, list[tuple[str, str]]]
"""Title -> rows of a name and its explanation."""


class SectionedCommand(TyperCommand):
    """A command whose help lists its options under the titles that they were given (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a list for each title; options without one come last."""
        sections: Sections = {"Arguments": []}
        others = []
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            title = getattr(parameter, "rich_help_panel", None)
            if row is None:
                continue
            if parameter.param_type_name == "argument":
                sections["Arguments"].append(row)
            elif title is None:
                others.append(row)
            else:
                sections.setdefault(title, []).append(row)
        _write(formatter, {**sections, "Options": others})


class CommandGroup(TyperGroup):
    """Commands under titles, each called by its name or by a beginning that no other has."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or the only one that begins so."""
        beginning = [name for name in self.commands if name.startswith(cmd_name)]
        alone = cmd_name not in self.commands and len(beginning) == 1
        return super().get_command(ctx, beginning[0] if alone else cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list for each title, in the order of `TITLES`."""
        sections: Sections = {title: [] for title in TITLES}
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None)
            row = name, command.get_short_help_str(formatter.width - 20)
            sections.setdefault(title if isinstance(title, str) else "More", []).append(row)
        _write(formatter, sections)


TITLES = ("Plan", "Look", "Run", "Take along", "Lists")


def _write(formatter: Any, sections: Sections) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
