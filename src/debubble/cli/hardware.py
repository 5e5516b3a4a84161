"""`debubble hardware`: the devices that are known by name."""

from __future__ import annotations

from dataclasses import asdict

from debubble.cli.app import app
from debubble.cli.output import Json, console, print_json


@app.command()
def hardware(json: Json = False) -> None:
    """List the devices that --cluster knows by name, with their peak rates; a cluster file can change every number."""
    from rich.table import Table

    from debubble.costs import hardware as registry

    if json:
        print_json({"hardware": [asdict(device) for device in registry.values()]})
        return
    columns = (
        "device",
        "memory GiB",
        "bf16 TFLOP/s",
        "memory GB/s",
        "link GB/s",
        "network GB/s",
        "host GB/s",
        "source",
    )
    table = Table(*columns, box=None, header_style="bold")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for d in registry.values():
        rates = (d.memory_bandwidth, d.link_bandwidth, d.network_bandwidth, d.host_bandwidth)
        table.add_row(
            d.name, f"{d.memory / 2**30:g}", f"{d.flops / 1e12:g}", *(f"{r / 1e9:g}" for r in rates), d.source
        )
    console().print(table)
