"""Mixers that carry a state from token to token in other ways than Mamba-2 and Gated DeltaNet, by their sizes."""

from __future__ import annotations

from dataclasses import dataclass

LIGHTNING_CHUNK = 256
"""Tokens of a block of lightning attention."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """A mixer of tokens: projections, a short convolution, a scan over the tokens and a projection of its result."""

    projection_width: float
    """Width of the projections before the scan."""
    convolution_width: float
    """Width of what passes a convolution."""
    values: int
    """Width of the result."""
    heads: int
    """Heads, or channels, that have a state each."""
    flops: float
    """Operations per token of the scan, forward."""
    weights: int
    """Parameters of it all, without the norm before it."""

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
        rank: Width of the vector that steps are projected from.
        kernel: Tokens that the convolution sees.
        conv_bias: Whether the convolution has a bias.
        bias: Whether the projections in and out have one.
        norms: Whether steps and the input and output vectors of states are normed (Jamba).
    """
    narrow = rank + 2 * state
    outer = 3 * hidden * inner + bias * (2 * inner + hidden)
    weights = (kernel + conv_bias) * inner + inner * narrow + (rank + 1) * inner + inner * (state + 1)
    return Recurrence(
        projection_width=2 * inner,
        convolution_width=inner,
        values=inner,
        heads=inner,
        # A number of the state decays, takes in and gives out: three multiplications and additions.
        flops=2 * inner * (narrow + rank) + 6.0 * inner * state,
        weights=outer + weights + norms * narrow,
    )


def short_convolution(*, hidden: int, kernel: int, bias: bool) -> Recurrence:
    """LFM2: a convolution of a few tokens between two gates."""
    return Recurrence(
        projection_width=3 * hidden,
        convolution_width=hidden,
        values=hidden,
        heads=hidden,
        flops=2.0 * kernel * hidden,
        weights=4 * hidden * hidden + kernel * hidden + bias * 5 * hidden,
    )


def gated_linear_recurrence(*, hidden: int, width: int, heads: int, kernel: int) -> Recurrence:
    """Griffin's RG-LRU (De et al., arXiv:2402.19427, section 2.4): gates of `heads` blocks, a number per channel."""
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
    """MiniMax-01 (arXiv:2501.08313, section 2.2): linear attention in blocks, with a gate and a norm of its result."""
    width = heads * head_dim
    return Recurrence(
        projection_width=4 * width,
        convolution_width=0,
        values=width,
        heads=heads,
        flops=heads * (4.0 * head_dim * head_dim + 2 * LIGHTNING_CHUNK * 2 * head_dim),
        weights=5 * hidden * width + width,
    )
