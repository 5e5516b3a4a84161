"""Colours and words for operations and causes, the same in every view."""

from __future__ import annotations

from debubble.ir import Kind
from debubble.simulator import Cause

KIND_COLORS = {
    Kind.F: "#4c7fb8", Kind.B: "#4f9d69", Kind.I: "#2f9c95", Kind.W: "#9bb53c", Kind.R: "#ec9a3c", Kind.S: "#8a6552",
    Kind.O: "#8e6bb0", Kind.L: "#c46a9b", Kind.G: "#7a8ca3", Kind.D: "#a58cc0", Kind.P: "#d79abb",
    Kind.SEND_F: "#7f93ad", Kind.RECV_F: "#a9b8ca", Kind.SEND_B: "#86a892", Kind.RECV_B: "#b2c9ba",
}  # fmt: skip

KIND_WORDS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "backward for inputs", Kind.W: "backward for weights",
    Kind.R: "recompute", Kind.S: "optimizer step", Kind.O: "offload", Kind.L: "reload", Kind.G: "gradient reduction",
    Kind.D: "gradients to host", Kind.P: "parameters from host", Kind.SEND_F: "send forward",
    Kind.RECV_F: "receive forward", Kind.SEND_B: "send backward", Kind.RECV_B: "receive backward",
}  # fmt: skip

CAUSE_COLORS = {
    Cause.WARM_UP: "#e3e8ef", Cause.COOL_DOWN: "#d3dae4", Cause.DEPENDENCY: "#f6cfcb", Cause.IMBALANCE: "#fae3b4",
    Cause.TRANSFER: "#e2d6f1", Cause.HOST_OPTIMIZER: "#d3bcae", Cause.OVERHEAD: "#efe6dc",
}  # fmt: skip

LIMIT_COLOR = "#d22f27"

PHASE_COLOR = "#8a7f9c"
"""The colour of a device's work before and after its program: data, updates."""


def shade(color: str, chunk: int, *, chunks: int) -> str:
    """Later chunks are lighter, so that the stages of one device can be told apart."""
    share = 0.45 * chunk / max(chunks - 1, 1)
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
