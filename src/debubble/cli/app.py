"""The typer application, its entry point, and the handling of errors.

Exit codes are 0 for success, 1 if the work failed or the plan is infeasible, and 2 for a wrong call or input.  Errors
that debubble raises print no traceback.
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
    """The application; all of its commands have help in sections."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Add a command, as typer does."""
        return super().command(name, cls=SectionedCommand, **settings)


def options_of(commands: Sequence[str]) -> set[str]:
    """The option names of these commands, without dashes."""
    for name in commands:
        importlib.import_module(f"debubble.cli.{name}")
    known: Any = typer.main.get_group(app).commands
    options = (option for name in commands for parameter in known[name].params for option in parameter.opts)
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


def _version(requested: bool) -> None:
    if requested:
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
    """The application after importing the modules of all commands."""
    import debubble.cli

    for module in pkgutil.iter_modules(debubble.cli.__path__):
        importlib.import_module(f"debubble.cli.{module.name}")
    return app


def with_command(name: str | None) -> App:
    """The application with only the command of this name, to start faster; with all commands if it is unknown."""
    module = f"debubble.cli.{name}" + "_" * (name in keyword.kwlist)
    if name is None or not name.isidentifier() or find_spec(module) is None:
        return with_all_commands()
    importlib.import_module(module)
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
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
    """Wrap a message of several lines at the console's width; a single line is returned unchanged."""
    if "\n" not in message:
        return message
    from debubble.cli.output import log
    from debubble.formatting import wrapped

    return wrapped(message, log().width)


def _make_streams_robust() -> None:
    """Replace characters that the streams' encoding lacks by `?`, and closed streams by the null device."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _log_to_standard_error() -> None:
    """Show the package's log messages, such as those on compilation."""
    logger = logging.getLogger("debubble")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


def _flush() -> None:
    """Flush standard output; if that raises OSError, drop its buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _interrupted() -> int:
    sys.stderr.write(SENTENCE)
    return INTERRUPTED
