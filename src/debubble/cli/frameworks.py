"""`debubble frameworks`: frameworks with cost models of kernels and overlaps."""

from __future__ import annotations

from debubble.cli.app import app
from debubble.cli.output import Json, console, print_answer


@app.command(rich_help_panel="Lists")
def frameworks(json: Json = False) -> None:
    """List the names, versions and traits that --framework knows.

    Traits can follow after commas.
    """
    from dataclasses import asdict

    from rich.padding import Padding
    from rich.table import Table

    from debubble.costs.frameworks import FRAMEWORKS, Framework

    usual = asdict(Framework())
    if json:
        listed = [
            {"name": name, "version": version, "traits": asdict(traits)}
            for name, versions in FRAMEWORKS.items()
            for version, traits in versions.items()
        ]
        print_answer(frameworks=listed, traits=usual)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, versions in FRAMEWORKS.items():
        for version, traits in versions.items():
            different = {trait: value for trait, value in asdict(traits).items() if value != usual[trait]}
            table.add_row(f" {name}@{version}", _words(different))
    usually = Table.grid()
    usually.add_column(overflow="fold")
    usually.add_row("Every other trait is as it is without --framework, which prices no launches by the host:")
    usually.add_row(_words(usual))
    usually.add_row("\n--framework NAME takes the newest version, and NAME,TRAIT=VALUE changes a trait.")
    console().print(table, "", Padding(usually, (0, 1)))


def _words(traits: dict[str, object]) -> str:
    return " ".join(f"{trait}={str(value).lower()}" for trait, value in traits.items() if value is not None)
