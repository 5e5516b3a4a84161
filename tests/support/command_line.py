"""Parses calls of `debubble` without running them."""

import typer

from debubble.cli.app import options_of, with_all_commands
from debubble.cli.help import CommandGroup


def check_call(words: list[str]) -> None:
    """Parse a call of `debubble`; raises for anything unknown."""
    group = typer.main.get_command(with_all_commands())
    assert isinstance(group, CommandGroup)
    context = typer.Context(group, obj=options_of)
    name, called, rest = group.resolve_command(context, words)
    assert called is not None
    # A job file has the content that `init` writes.
    rest = ["llama-tiny" if word.endswith(".toml") else word for word in rest]
    called.make_context(name, rest, parent=context)
