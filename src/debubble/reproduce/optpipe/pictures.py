"""OptPipe's Figures 4, 5 and 6, drawn from our own figures."""

from __future__ import annotations

from pathlib import Path

from debubble.reproduce.registry import Table
from debubble.simulator import Timeline
from debubble.views import Scene, views

COLOURS = {"PipeOffload": "tab:orange", "AdaOffload": "tab:red", "zb limited": "tab:green", "OptPipe": "tab:blue"}


def draw(folder: Path, *, toy: dict[str, Timeline], memory: Table, many: Table) -> tuple[Path, ...]:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    places = tuple(folder / f"optpipe-figure-{number}.png" for number in (4, 5, 6))
    scenes = [Scene.of(timeline, title=f"{name}: {timeline.makespan}") for name, timeline in toy.items()]
    places[0].write_bytes(views["png"](scenes))
    _draw_memory(places[1], memory)
    _draw_many(places[2], many)
    return places


def _draw_memory(place: Path, table: Table) -> None:
    """Least to greatest peak as a bar, the average as a mark, one pair of bars per setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels: list[str] = []
    for number, (_, model, m, size, method, *figures, _) in enumerate(table.rows):
        least, average, greatest = (float(f or 0) for f in figures)
        axes.bar(number, greatest - least, bottom=least, color=COLOURS[str(method)], alpha=0.5)
        axes.plot(number, average, "k_", markersize=8)
        labels.append(f"{model} {m}x{size}" if method == "PipeOffload" else "")
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("peak memory, GiB")
    axes.set_title("PipeOffload (orange) and OptPipe (blue): least, average and greatest peak over the devices")
    figure.savefig(place)


def _draw_many(place: Path, table: Table) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    counts = [int(row[0] or 0) for row in table.rows]
    for name, colour in COLOURS.items():
        column = table.columns.index(f"{name} ms")
        axes.plot(counts, [float(row[column] or 0) / 1000 for row in table.rows], "o-", label=name, color=colour)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches")
    axes.set_ylabel("seconds per iteration")
    axes.legend()
    axes.set_title(table.title)
    figure.savefig(place)
