"""Colors and words for operations, causes and memory parts, shared by all views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from debubble.ir import Kind
from debubble.simulator import Cause

KIND_COLORS = {
    Kind.F: "#4f7fd0", Kind.B: "#4cb07c", Kind.I: "#2a5f73", Kind.W: "#b7dc55", Kind.R: "#dd7a24", Kind.S: "#6e4a3c",
    Kind.O: "#8e6bb0", Kind.L: "#c46a9b", Kind.G: "#7a8ca3", Kind.D: "#a58cc0", Kind.P: "#d79abb",
    Kind.SEND_F: "#7f93ad", Kind.RECV_F: "#a9b8ca", Kind.SEND_B: "#86a892", Kind.RECV_B: "#b2c9ba",
    Kind.UNSHARD_F: "#9db4d6", Kind.UNSHARD_R: "#d9b48f", Kind.UNSHARD_B: "#9cc7ab",
    Kind.RESHARD_F: "#c3cbd6", Kind.RESHARD_R: "#c3cbd6", Kind.RESHARD_B: "#c3cbd6",
}  # fmt: skip
"""Colors of the compute lane's kinds are distinct for color-blind readers too; other lanes have rows of their own."""

KIND_WORDS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "backward for inputs", Kind.W: "backward for weights",
    Kind.R: "recompute", Kind.S: "optimizer step", Kind.O: "offload", Kind.L: "reload", Kind.G: "gradient reduction",
    Kind.D: "gradients to host", Kind.P: "parameters from host", Kind.SEND_F: "send forward",
    Kind.RECV_F: "receive forward", Kind.SEND_B: "send backward", Kind.RECV_B: "receive backward",
    Kind.UNSHARD_F: "gather parameters for a forward", Kind.UNSHARD_R: "gather parameters for a recomputation",
    Kind.UNSHARD_B: "gather parameters for a backward", Kind.RESHARD_F: "free parameters after a forward",
    Kind.RESHARD_R: "free parameters after a recomputation", Kind.RESHARD_B: "free parameters after a backward",
}  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """Colors of background, text and idle time."""

    paper: str
    ink: str
    muted: str
    """Secondary text."""
    grid: str
    limit: str
    memory: str
    causes: Mapping[Cause, str]


LIGHT = Theme(
    paper="#ffffff", ink="#1f2733", muted="#5b6574", grid="#e6e9ef", limit="#d22f27", memory="#2b5c8f",
    causes={
        Cause.WARM_UP: "#e6ebf2", Cause.COOL_DOWN: "#b4bfce", Cause.DEPENDENCY: "#f2a48f", Cause.IMBALANCE: "#f7e27e",
        Cause.TRANSFER: "#cdb2ea", Cause.HOST_OPTIMIZER: "#a9805a", Cause.OVERHEAD: "#59626f",
    },
)  # fmt: skip

DARK = Theme(
    paper="#171b21", ink="#e6e9ee", muted="#a3adba", grid="#2b323c", limit="#ff6b61", memory="#86b4e6",
    causes={
        Cause.WARM_UP: "#333c49", Cause.COOL_DOWN: "#5a6778", Cause.DEPENDENCY: "#e07a62", Cause.IMBALANCE: "#d9bf4a",
        Cause.TRANSFER: "#8f74bd", Cause.HOST_OPTIMIZER: "#5f452c", Cause.OVERHEAD: "#c9d1dc",
    },
)  # fmt: skip

THEMES = {"light": LIGHT, "dark": DARK}

PART_COLORS = {
    "model states": "#3b6ea8", "weights": "#3b6ea8", "gradients": "#7fb0e0", "optimizer": "#6e4a3c",
    "workspace": "#9aa5b1", "activations": "#4cb07c", "memory": "#2b5c8f",
}  # fmt: skip
"""Colors of the parts of a device's memory, from the bottom up."""

RECOMPUTE_COLORS = ("#fff0b8", "#fbc95c", "#f0932b", "#cf5a17", "#96360c", "#531c05")
"""Colors of recomputation strategies, darker for more; all are distinct for color-blind readers, also from forwards."""

PHASE_COLOR = "#8a7f9c"
"""Color of a device's work before and after its program, such as data loading and updates."""


def shade(color: str, chunk: int, *, chunks: int) -> str:
    """Lighten the color of later chunks, which distinguishes the stages of a device."""
    share = 0.45 * chunk / max(chunks - 1, 1)
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in parts)


def recompute_colors(names: Sequence[str]) -> dict[str, str]:
    """A color for every recomputation strategy, spread over the scale."""
    last = len(RECOMPUTE_COLORS) - 1
    if len(names) == 1:
        return {names[0]: RECOMPUTE_COLORS[last // 2]}
    step = max(last / max(len(names) - 1, 1), 1)
    return {name: RECOMPUTE_COLORS[round(i * step) % len(RECOMPUTE_COLORS)] for i, name in enumerate(names)}


def ink_on(color: str) -> str:
    """The text color on a background: dark blue or white where legible by WCAG, else black or white."""
    for ink in ("#1f2733", "#ffffff"):
        if contrast(ink, color) >= LEGIBLE_CONTRAST:
            return ink
    return max("#000000", "#ffffff", key=lambda ink: contrast(ink, color))


LEGIBLE_CONTRAST = 4.5
"""Minimum contrast ratio of text (WCAG 2.2, 1.4.3)."""


def contrast(one: str, other: str) -> float:
    """The WCAG contrast ratio of two colors, 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
