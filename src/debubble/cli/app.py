"""The typer application, and what happens to errors.

Exit 0: done; 1: the work failed or the plan is infeasible; 2: the call or its input is wrong.  No traceback reaches
the user for anything that debubble itself raises.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys

import typer

from debubble.errors import DebubbleError

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

app = typer.Typer(
    name="debubble",
    help="Plan, simulate and run pipeline-parallel LLM training under a memory limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)


@app.callback()
def _root() -> None:
    pass


def main() -> None:
    """Entry point of `debubble`."""
    import debubble.cli

    for module in pkgutil.iter_modules(debubble.cli.__path__):
        importlib.import_module(f"debubble.cli.{module.name}")
    try:
        app()
    except DebubbleError as error:
        if "--json" in sys.argv:
            json.dump({"error": str(error), "kind": type(error).__name__}, sys.stdout)
            sys.stdout.write("\n")
        sys.stderr.write(f"debubble: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(_interrupted())
    except SystemExit as end:
        if end.code == INTERRUPTED:  # how typer passes a Ctrl-C on
            _interrupted()
        raise


def _interrupted() -> int:
    sys.stderr.write("debubble: interrupted.\n")
    return INTERRUPTED
