"""Terminal tables of device memory by part: of choices of degrees, and of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from debubble.errors import readable_bytes
from debubble.formatting import listed
from debubble.planners.degrees.memory import Fit, Footprint
from debubble.planners.degrees.remedies import option_words
from debubble.views.scene import Scene
from debubble.views.terminal import titled_table

PARTS = ("weights", "gradients", "optimizer", "activations", "workspace")
DEGREES = ("pipeline", "tensor", "data", "context", "expert")
MAIN_DEGREES = DEGREES[:3]
"""Degrees that are always shown; others are shown where some choice uses them."""
HEADERS = {
    "weights": "weights", "gradients": "gradi-\nents", "optimizer": "optim-\nizer", "activations": "activ-\nations",
    "workspace": "work-\nspace", "recomputed": "recom-\nputed",
}  # fmt: skip
"""Two-line headers, which fit the table into 80 characters."""
UNITS = {"GiB": 2**30, "MiB": 2**20}
STEP_BUFFERS = "receive buffers and logits that its framework keeps of all micro-batches"
MIN_WHOLE_SIZE = 100
"""Sizes from this value on, in the table's unit, are shown without decimals."""
SHORT_FITS = {"with recomputation": "full"}
STYLES = {"yes": "green", "likely": "green", "with recomputation": "yellow", "no": "red"}


def render_footprints(footprints: Sequence[Footprint], *, reserve: float, left_out: int) -> RenderableType:
    """Render a table with a row per choice of degrees and ZeRO level, those that fit first.

    Args:
        footprints: The memory of the choices.
        reserve: Bytes of a device that no plan may use.
        left_out: Number of choices that are not shown.
    """
    limit = readable_bytes(min(choice.limit for choice in footprints))
    unit = unit_of(choice.kept.total for choice in footprints)
    names = [name for name in DEGREES if name in MAIN_DEGREES or any(getattr(f.degrees, name) > 1 for f in footprints)]
    title = f"{unit} on the fullest device, of {limit} next to a reserve of {readable_bytes(reserve)}"
    sliced = any(choice.degrees.slices > 1 for choice in footprints)
    columns = ("x".join(name[0] for name in names) + "/n" * sliced, "ZeRO", *PARTS, "total", "recomputed", "fits")
    table = titled_table(title, [HEADERS.get(name, name) for name in columns], texts=("fits",), no_wrap=True)
    table.padding = (0, 0, 0, 1)
    for choice in sorted(footprints, key=lambda f: list(STYLES).index(f.fits)):
        degrees = "x".join(str(getattr(choice.degrees, name)) for name in names)
        degrees += f"/{choice.degrees.slices}" * (choice.degrees.slices > 1)
        sizes = (_in_unit(getattr(choice.kept, name), unit) for name in PARTS)
        totals = _in_unit(choice.kept.total, unit), _in_unit(choice.recomputed.total, unit)
        fits = Text(SHORT_FITS.get(choice.fits, choice.fits), style=STYLES[choice.fits])
        table.add_row(degrees, str(choice.degrees.zero), *sizes, *totals, fits)
    gathering = max((choice.degrees.chunks or 1 for choice in footprints if choice.degrees.zero == 3), default=1)
    chunks = max((choice.degrees.chunks or 1 for choice in footprints if choice.degrees.zero < 3), default=gathering)
    order = f"interleaved 1F1B of {chunks} chunks" if chunks > 1 else "1F1B"
    sharded = f" (with ZeRO-3 up to {gathering} chunks, two of them gathered)" if gathering > chunks else ""
    doubt = (
        f" `likely` where published runs like these took up to {max(f.most for f in footprints):.2f} times the"
        " predicted bytes, which is more than there is;"
    )
    doubtful = doubt * any(choice.fits == "likely" for choice in footprints)
    words = (
        f"Degrees are {' x '.join(names)}{' / slices' * sliced}, with {order} on even stages"
        f"{sharded}: `yes` as they are,{doubtful} `full` if they recompute"
        " everything; offload and host optimizers, which `plan` knows too, are not counted."
    )
    more = (
        f"  {left_out} choices with context or other expert ranks, slices, or tensor ranks over several nodes, are"
        " in --json."
    )
    return Group(Text(_verdict(footprints), style="bold"), table, Text(words + more * bool(left_out)))


def _verdict(footprints: Sequence[Footprint]) -> str:
    """A sentence on how many choices fit, and on those of least memory."""
    fitting = [choice for choice in footprints if choice.fits != "no"]
    if not fitting:
        return "No choice fits by recomputation alone; `debubble plan` also tries offload and CPU optimizers."
    counted = Counter(choice.fits for choice in fitting)
    ways = [_fit_words(counted[fit], fit) for fit in _WAYS if counted[fit]]
    ways[0] = ways[0].replace(" ", f" of {len(footprints)} choices ", 1)
    smallest = [_least([choice for choice in fitting if choice.fits != "with recomputation"], recomputed=False)]
    smallest += [_least(fitting, recomputed=True)]
    return f"Yes: {listed(ways)}; the least memory is {listed([*filter(None, smallest)])}."


_WAYS: Mapping[Fit, tuple[str, str]] = {
    "yes": ("fits as it is", "fit as they are"),
    "likely": ("likely fits", "likely fit"),
    "with recomputation": ("fits with full recomputation", "fit with full recomputation"),
}
"""Words for the degrees of fit of one and of several choices, in the order of the verdict."""


def _fit_words(count: int, fit: Fit) -> str:
    one, several = _WAYS[fit]
    return f"{count} {one if count == 1 else several}"


def _least(choices: Sequence[Footprint], *, recomputed: bool) -> str:
    """Words for the choice of least memory; empty without choices."""

    def size(choice: Footprint) -> float:
        return float((choice.recomputed if recomputed else choice.kept).total)

    best = min(choices, key=size, default=None)
    if best is None:
        return ""
    return f"{readable_bytes(size(best))} with {option_words(best.degrees)}{' recomputing everything' * recomputed}"


def memory_table(scene: Scene) -> Table:
    """A table of each device's memory at its peak, by part, for a model's plan."""
    columns, unit = ("device", *PARTS, "peak", "limit"), unit_of(map(float, scene.peak_memory))
    table = titled_table(f"{unit} at the peak, per device", [HEADERS.get(name, name) for name in columns], no_wrap=True)
    for device, parts in enumerate(scene.parts_at_the_peak):
        limit = scene.limits[device]
        sizes = [*(parts[name] for name in PARTS), float(scene.peak_memory[device])]
        cells = (_in_unit(size, unit) for size in sizes)
        table.add_row(str(device), *cells, "-" if limit is None else _in_unit(float(limit), unit))
    buffers = [memory.step_buffers for memory in scene.why.memory] if scene.why else []
    if any(buffers):
        of_devices = ", ".join(_in_unit(size, unit) for size in buffers)
        table.caption = f"Of the workspace {of_devices} {unit} are {STEP_BUFFERS}."
    return table


def unit_of(sizes: Iterable[float]) -> str:
    """GiB if the largest size is at least 1 GiB, else MiB."""
    return "GiB" if max(sizes) >= UNITS["GiB"] else "MiB"


def _in_unit(size: float, unit: str) -> str:
    value = size / UNITS[unit]
    return f"{value:.1f}" if value < MIN_WHOLE_SIZE else f"{value:.0f}"
