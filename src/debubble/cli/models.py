"""`debubble models`: models that are known by name."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from debubble.cli.app import app
from debubble.cli.names import completion, model_names
from debubble.cli.output import Json, console, figure_table, print_answer
from debubble.models.architecture import VisionTower

FIGURES = ("family", "parameters", "active_parameters", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


@app.command(rich_help_panel="Lists")
def models(
    named: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models to list, by name or config.json (default: all that are known by name).",
            metavar="[MODEL ...]",
            autocompletion=completion(model_names),
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the models known by name, or those of a config.json."""
    from debubble.models import models as registry
    from debubble.models import named_model

    listed = {name: named_model(name) for name in named} if named else dict(registry.items())
    if json:
        print_answer(
            models=[
                {
                    "name": name,
                    **{figure: getattr(m, figure) for figure in FIGURES},
                    "experts": 0 if m.experts is None else m.experts.count,
                    **({} if m.vision is None else {"language": m.language, "vision": _vision(m.vision)}),
                }
                for name, m in listed.items()
            ]
        )
        return
    columns = ("model", "size", "layers", "hidden", "heads", "kv", "ffn", "vocab", "experts")
    table = figure_table(*columns, padding=(0, 1, 0, 0), pad_edge=False)
    for name, m in listed.items():
        size = f"{m.parameters / 1e9:.1f} B" if m.parameters >= 1e9 else f"{m.parameters / 1e6:.1f} M"
        experts = "" if m.experts is None else f"{m.experts.per_token} of {m.experts.count}"
        table.add_row(name, size, *map(str, (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.vocab)), experts)
    console().print(table)
    if all(m.vision is None for m in listed.values()):
        return
    towers = figure_table(
        "with a tower", "language", "size", "tower", "size", "layers", "hidden", padding=(0, 1, 0, 0), pad_edge=False
    )
    for name, m in listed.items():
        if m.vision is not None:
            tower, tower_parameters = m.vision.tower, m.vision.parameters
            sizes = f"{(m.parameters - tower_parameters) / 1e9:.1f} B", m.vision.kind, f"{tower_parameters / 1e9:.2f} B"
            towers.add_row(name, m.language, *sizes, str(tower.layers), str(tower.hidden))
    console().print(towers)


def _vision(vision: VisionTower) -> dict[str, Any]:
    """The JSON entries of a vision tower."""
    tower = vision.tower
    return {
        "kind": vision.kind, "parameters": vision.parameters, "layers": tower.layers, "hidden": tower.hidden,
        "patches": vision.patches, "tokens": vision.tokens,
    }  # fmt: skip
