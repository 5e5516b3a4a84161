"""`debubble hardware`: devices that are known by name."""

from __future__ import annotations

from debubble.cli.app import app
from debubble.cli.output import Json, console, figure_table, print_answer


@app.command(rich_help_panel="Lists")
def hardware(json: Json = False) -> None:
    """List the devices of --cluster, with their peak rates.

    A cluster file can change them.
    """
    from rich.table import Table

    from debubble.costs import hardware as registry

    if json:
        print_answer(hardware=list(registry.values()))
        return
    columns = ("device", "memory GiB", "16-bit TFLOP/s", "fp8", "memory", "link", "network", "host", "host GiB")
    rates = figure_table(*columns, padding=(0, 1, 0, 0), pad_edge=False)
    sources = Table.grid(padding=(0, 2, 0, 0))
    sources.add_column(no_wrap=True)
    sources.add_column(overflow="fold")
    for d in registry.values():
        host = f"{d.host_memory / 2**30:.3g}" if d.host_memory else "-"
        bandwidths = (d.memory_bandwidth, d.link_bandwidth, d.network_bandwidth, d.host_bandwidth)
        fp8 = f"{d.fp8_flops / 1e12:g}" if d.fp8_flops else ""
        rates.add_row(
            d.name,
            f"{d.memory / 2**30:.4g}",
            f"{d.flops / 1e12:g}",
            fp8,
            *(f"{b / 1e9:g}" for b in bandwidths),
            host,
        )
        sources.add_row(d.name, f"{d.source} {d.url}".rstrip())
    console().print(
        rates,
        "\nBandwidths are GB/s and direction, between devices (link), nodes and to the host. Plans may use"
        " `host GiB` of a host for each device, nine tenths of a usual server's (-: no limit; host_memory in a cluster"
        " file replaces it).\n",
        sources,
    )
