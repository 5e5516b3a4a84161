"""The typer application, what commands that run models begin with, and what happens to errors.

Exit 0: done; 1: the work failed or the plan is infeasible; 2: the call or its input is wrong.  No traceback reaches
the user for anything that debubble itself raises.
"""

from __future__ import annotations

import importlib
import io
import json
import keyword
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.models import CommandFunctionType

from debubble import __version__
from debubble.cli.help import CommandGroup, SectionedCommand
from debubble.errors import DebubbleError, InputError
from debubble.interrupts import INTERRUPTED, SENTENCE


class App(typer.Typer):
    """The application; every command of it has its help in sections."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Add a command, as typer does."""
        return super().command(name, cls=SectionedCommand, **settings)


def options_of(commands: Sequence[str]) -> set[str]:
    """The names of the options of these commands, without their dashes."""
    for name in commands:
        importlib.import_module(f"debubble.cli.{name}")
    known: Any = typer.main.get_group(app).commands
    options = (option for name in commands for each in known[name].params for option in each.opts)
    return {option.removeprefix("--") for option in options if option.startswith("--")}


app = App(
    name="debubble",
    cls=CommandGroup,
    help="Plan, simulate and run pipeline-parallel LLM training under a memory limit.  Commands, options and names may"
    " be cut short where only one begins so.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"], "obj": options_of},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"debubble {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def with_all_commands() -> App:
    """The application, once every module next to this one has added its command."""
    import debubble.cli

    for module in pkgutil.iter_modules(debubble.cli.__path__):
        importlib.import_module(f"debubble.cli.{module.name}")
    return app


def with_command(name: str | None) -> App:
    """The application with the command of this name alone, which loads sooner; with all of them if there is none."""
    module = f"debubble.cli.{name}" + "_" * (name in keyword.kwlist)
    if name is None or not name.isidentifier() or find_spec(module) is None:
        return with_all_commands()
    importlib.import_module(module)
    known = {each.name or getattr(each.callback, "__name__", "") for each in app.registered_commands}
    return app if name in known else with_all_commands()


def require_torch() -> None:
    """Raise InputError unless torch is installed."""
    if find_spec("torch") is None:
        raise InputError("This command needs PyTorch: install debubble's extra, `pip install 'debubble[torch]'`.")


def main() -> None:
    """Entry point of `debubble`."""
    _make_streams_robust()
    _log_to_standard_error()
    try:
        try:
            with_command(next(iter(sys.argv[1:]), None))()
        finally:
            _flush()
    except DebubbleError as error:
        if any(len(word) > 2 and "--json-stream".startswith(word) for word in sys.argv):
            json.dump({"error": str(error), "kind": type(error).__name__}, sys.stdout)
            sys.stdout.write("\n")
        sys.stderr.write(f"{_wrapped(f'debubble: {error}')}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        sys.stderr.write(f"debubble: {error.strerror or error}.\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as end:
        if end.code == INTERRUPTED:  # how typer passes a Ctrl-C on
            _interrupted()
        raise


def _wrapped(message: str) -> str:
    """A message of several lines at the width of other answers; one of a single line stays whole."""
    if "\n" not in message:
        return message
    from debubble.cli.output import log
    from debubble.formatting import wrapped

    return wrapped(message, log().width)


def _make_streams_robust() -> None:
    """Show `?` for characters that the terminal's encoding lacks, and drop what a closed stream cannot take."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _log_to_standard_error() -> None:
    """Show what the package logs, such as that it compiles."""
    logger = logging.getLogger("debubble")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


def _flush() -> None:
    """Write what standard output still holds; raises OSError if it takes no more, and then drops the rest."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _interrupted() -> int:
    sys.stderr.write(SENTENCE)
    return INTERRUPTED
