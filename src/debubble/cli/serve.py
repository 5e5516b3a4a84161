"""`debubble serve`: the workbench in the browser."""

from __future__ import annotations

import signal
import webbrowser
from typing import Annotated

import typer

from debubble.cli.app import app
from debubble.cli.output import Json, console, log, print_answer


@app.command(rich_help_panel="Plan")
def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0: any that is free).")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reached from this machine alone.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser", help="Open a browser.")] = False,
    json: Json = False,
) -> None:
    """Open a workbench for the browser.

    Choose, watch the search, drag limits, compare, export; Ctrl-C ends it.
    """
    from debubble.serve import Workbench

    with Workbench(host, port) as workbench:
        if host not in ("127.0.0.1", "localhost", "::1"):
            log().print("Who reaches this address and knows the token can start searches on this machine.")
        if json:
            print_answer(address=workbench.address)
        else:
            console().print(f"The workbench is at {workbench.address}", soft_wrap=True)
        if browser:
            webbrowser.open(workbench.address)
        # Both signals end the workbench and its searches, even if its shell ignores Ctrl-C.
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, signal.default_int_handler)
        try:
            workbench.serve_forever()
        except KeyboardInterrupt:
            log().print("The workbench is closed.")
