"""`debubble schedules`: the registered schedules."""

from __future__ import annotations

from debubble.cli.app import app
from debubble.cli.output import Json, console, print_answer


@app.command(rich_help_panel="Lists")
def schedules(json: Json = False) -> None:
    """List the schedules, with source and closed forms.

    The closed forms are those of uniform costs.
    """
    from rich.table import Table
    from rich.text import Text

    from debubble.schedules import schedules as registry

    entries = [registry[name] for name in sorted(registry)]
    if json:
        listed = [
            {
                "name": e.name,
                "paper": e.paper,
                "bubble": e.bubble,
                "memory": e.memory,
                "chunks": e.default_chunks,
                "options": sorted(e.options - {"devices", "micro_batches", "costs"}),
                "summary": e.summary,
            }
            for e in entries
        ]
        print_answer(schedules=listed)
        return
    table = Table.grid(padding=(0, 2, 1, 0))
    for e in entries:
        text = f"{e.paper}\n{e.summary}\nbubble {e.bubble}; activations {e.memory}"
        table.add_row(Text(e.name, style="bold"), Text(text))
    console().print(table)
