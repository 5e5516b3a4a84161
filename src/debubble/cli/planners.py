"""`debubble planners`: the registered planners."""

from __future__ import annotations

from debubble.cli.app import app
from debubble.cli.output import Json, console, print_answer


@app.command(rich_help_panel="Lists")
def planners(json: Json = False) -> None:
    """List the planners, with their source."""
    from rich.table import Table
    from rich.text import Text

    from debubble.planners import planners as registry

    entries = [registry[name] for name in sorted(registry)]
    if json:
        print_answer(planners=[{"name": e.name, "paper": e.paper, "summary": e.summary} for e in entries])
        return
    table = Table.grid(padding=(0, 2, 1, 0))
    for e in entries:
        table.add_row(Text(e.name, style="bold"), Text(f"{e.paper}\n{e.summary}"))
    console().print(table)
