"""`debubble models`: the models that are known by name."""

from __future__ import annotations

from debubble.cli.app import app
from debubble.cli.output import Json, console, print_answer


@app.command(rich_help_panel="Lists")
def models(json: Json = False) -> None:
    """List the models that plan, simulate and train know by name; any config.json works as well."""
    from rich.table import Table

    from debubble.models import models as registry

    if json:
        print_answer(
            models=[
                {
                    "name": name,
                    "family": m.family,
                    "parameters": m.parameters,
                    "active_parameters": m.active_parameters,
                    "layers": m.layers,
                    "hidden": m.hidden,
                    "heads": m.heads,
                    "kv_heads": m.kv_heads,
                    "ffn": m.ffn,
                    "vocab": m.vocab,
                    "experts": 0 if m.experts is None else m.experts.count,
                }
                for name, m in registry.items()
            ]
        )
        return
    columns = ("model", "size", "layers", "hidden", "heads", "kv", "ffn", "vocab", "experts")
    table = Table(*columns, box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for name, m in registry.items():
        experts = "" if m.experts is None else f"{m.experts.per_token} of {m.experts.count}"
        sizes = (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.vocab)
        table.add_row(name, _readable(m.parameters), *map(str, sizes), experts)
    console().print(table)


def _readable(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
