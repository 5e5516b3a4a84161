"""Recurrent token mixers other than Mamba-2 and Gated DeltaNet, described by their sizes."""

from __future__ import annotations

from dataclasses import dataclass

LIGHTNING_CHUNK = 256
"""Tokens per block of lightning attention."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A token mixer: projections, a short convolution, a scan over the tokens and an output projection."""

    projection_width: float
    """Width of the projections before the scan."""
    convolution_width: float
    """Width of the convolution's input."""
    values: int
    """Width of the scan's output."""
    heads: int
    """Number of heads, or of channels, which have a state each."""
    flops: float
    """Forward operations per token of the scan."""
    weights: int
    """All parameters, without those of the norm before it."""

    def parameters(self, hidden: int) -> int:
        """Parameters of projections, convolution and scan."""
        return self.weights


def selective_scan(
    *, hidden: int, inner: int, state: int, rank: int, kernel: int, conv_bias: bool, bias: bool, norms: bool = False
) -> Recurrence:
    """Mamba (Gu and Dao, arXiv:2312.00752, section 3): `inner` channels with a state of `state` numbers each.

    Args:
        hidden: Hidden size.
        inner: Channels.
        state: Numbers of a channel's state.
        rank: Width of the vector from which steps are projected.
        kernel: Kernel size of the convolution, in tokens.
        conv_bias: Whether the convolution has a bias.
        bias: Whether the input and output projections have one.
        norms: Whether steps, and the states' input and output vectors, have norms (Jamba).
    """
    narrow = rank + 2 * state
    outer = 3 * hidden * inner + bias * (2 * inner + hidden)
    weights = (kernel + conv_bias) * inner + inner * narrow + (rank + 1) * inner + inner * (state + 1)
    return Recurrence(
        projection_width=2 * inner,
        convolution_width=inner,
        values=inner,
        heads=inner,
        # Decay, input and output of a state's number take a multiplication and an addition each.
        flops=2 * inner * (narrow + rank) + 6.0 * inner * state,
        weights=outer + weights + norms * narrow,
    )


def short_convolution(*, hidden: int, kernel: int, bias: bool) -> Recurrence:
    """LFM2: a short convolution between two gates."""
    return Recurrence(
        projection_width=3 * hidden,
        convolution_width=hidden,
        values=hidden,
        heads=hidden,
        flops=2.0 * kernel * hidden,
        weights=4 * hidden * hidden + kernel * hidden + bias * 5 * hidden,
    )


def gated_linear_recurrence(*, hidden: int, width: int, heads: int, kernel: int) -> Recurrence:
    """Griffin's RG-LRU (De et al., arXiv:2402.19427, section 2.4): block-diagonal gates, one state per channel."""
    gates = 2 * (width * (width // heads) + width)
    return Recurrence(
        projection_width=2 * width,
        convolution_width=width,
        values=width,
        heads=width,
        flops=2.0 * gates + 8 * width,
        weights=3 * hidden * width + 2 * width + hidden + (kernel + 1) * width + gates + width,
    )


def lightning_attention(*, hidden: int, heads: int, head_dim: int) -> Recurrence:
    """MiniMax-01 (arXiv:2501.08313, section 2.2): linear attention in blocks, with a gate and an output norm."""
    width = heads * head_dim
    return Recurrence(
        projection_width=4 * width,
        convolution_width=0,
        values=width,
        heads=heads,
        flops=heads * (4.0 * head_dim * head_dim + 2 * LIGHTNING_CHUNK * 2 * head_dim),
        weights=5 * hidden * width + width,
    )
