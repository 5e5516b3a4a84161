"""Writes a manual page for debubble and for each of its commands: `python tools/write_man_pages.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from debubble import __version__
from debubble.cli.app import with_all_commands


def escaped(text: str) -> str:
    """Escape text for roff: no requests at the start of a line, and minus signs that can be copied."""
    return text.replace("\\", r"\e").replace("-", r"\-").replace("\n.", "\n\\&.").strip()


def page(name: str, command: Any) -> str:
    """The manual page of a command, in roff."""
    context = command.context_class(command, info_name=name.replace("-", " "))
    records = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    usage = " ".join(command.collect_usage_pieces(context))
    described = [f".TP\n.B {escaped(option)}\n{escaped(text) or 'The argument.'}" for option, text in records]
    commands = [
        f".TP\n.BR {escaped(f'{name}-{sub}')} (1)\n{escaped(subcommand.get_short_help_str(100))}"
        for sub, subcommand in sorted(getattr(command, "commands", {}).items())
    ]
    sections = {
        "NAME": f"{escaped(name)} \\- {escaped(command.get_short_help_str(100))}",
        "SYNOPSIS": f".B {escaped(context.info_name)}\n{escaped(usage)}",
        "DESCRIPTION": escaped(command.help or "").replace("\n\n", "\n.PP\n"),
        "OPTIONS": "\n".join(described),
        "COMMANDS": "\n".join(commands),
    }
    head = f'.TH "{name.upper()}" 1 "" "debubble {__version__}"'
    return "\n".join([head, *(f".SH {title}\n{text}" for title, text in sections.items() if text)]) + "\n"


def main(folder: Path) -> None:
    """Write every page."""
    folder.mkdir(parents=True, exist_ok=True)
    group: Any = typer.main.get_command(with_all_commands())
    pages = {"debubble": group, **{f"debubble-{name}": command for name, command in group.commands.items()}}
    for name, command in pages.items():
        (folder / f"{name}.1").write_text(page(name, command))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
