"""Token mixers: attention of several kinds, linear attention, state spaces."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.models.recurrences import Recurrence


def _mean_keys(length: int, *, limit: int) -> float:
    """Mean keys per token of a causal sequence with at most `limit` keys per token; the token itself counts half."""
    limit = min(limit, length)
    return limit * (1 - limit / (2 * length))


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: the base, and the scaling of frequencies for longer contexts."""

    theta: float
    kind: str = "default"
    """transformers' `rope_type`."""
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention; its sizes are the model's."""

    rope: Rope | None = None
    window: int | None = None
    """Sliding window in tokens, including the token itself; None: no window."""
    chunk: int | None = None
    """Tokens attend only within chunks of this length (Llama 4); None: no chunks."""
    causal: bool = True
    """False if tokens attend to all others, as patches of an image do."""
    gated: bool = False
    """True if the output is multiplied by a sigmoid gate, which the query projection also computes (Qwen3-Next)."""
    sinks: bool = False
    """True if the softmax of every head has a learned attention sink (gpt-oss)."""

    def keys_per_token(self, length: int) -> float:
        """Mean keys that a token of a sequence attends to; the token itself counts half."""
        chunk = length if self.chunk is None else min(self.chunk, length)
        if not self.causal:
            return chunk
        return _mean_keys(chunk, limit=chunk if self.window is None else self.window)


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """The indexer of sparse attention, which chooses keys by small heads (DeepSeek-V3.2, arXiv:2512.02556, 2.1)."""

    heads: int
    width: int
    """Width of a query head, and of the key, which heads share."""
    tokens: int
    """Maximum number of chosen tokens."""
    reused: bool = False
    """True if it reuses the choice of a previous layer (`shared` in GLM-5's indexer_types)."""

    def parameters(self, hidden: int, query_rank: int) -> int:
        """Parameters of the query and key projections, the key's norm, and the heads' weights."""
        if self.reused:
            return 0
        return query_rank * self.heads * self.width + hidden * (self.width + self.heads) + 2 * self.width

    def flops(self, length: int) -> float:
        """Forward operations per token of the scores of all previous tokens; the choice has no gradient."""
        return 0 if self.reused else length * self.heads * self.width

    def keys_per_token(self, length: int) -> float:
        """Mean chosen tokens per token of a sequence; the token itself counts half."""
        return _mean_keys(length, limit=self.tokens)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    In training the latent vector is up-projected to keys and values of all heads.
    """

    heads: int
    query_rank: int | None
    """Width of the latent vector of queries; None: queries are projected from the hidden state."""
    rank: int
    """Width of the latent vector of keys and values."""
    content: int
    """Width of a query or key without its rotary part."""
    rotary: int
    """Width of the rotary part, which all keys share."""
    value: int
    """Width of a value."""
    bias: bool = False
    indexer: Indexer | None = None
    """The indexer of sparse attention; None: attention is dense."""

    @property
    def queries(self) -> int:
        """Width of all queries, and of all up-projected keys."""
        return self.heads * (self.content + self.rotary)

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.heads * self.value

    @property
    def expansion_width(self) -> int:
        """Width of the up-projection: keys without their rotary part, and values."""
        return self.heads * (self.content + self.value)

    def parameters(self, hidden: int) -> int:
        """Parameters of projections and of the norms of both latent vectors."""
        if self.query_rank is None:
            queries = hidden * self.queries
        else:
            queries = self.query_rank * (hidden + 1 + self.queries) + self.bias * self.query_rank
        keys = hidden * (self.rank + self.rotary) + self.rank * (1 + self.expansion_width)
        biases = self.bias * (self.rank + self.rotary + hidden)
        index = 0 if self.indexer is None else self.indexer.parameters(hidden, self.query_rank or hidden)
        return queries + keys + biases + self.values * hidden + index

    @property
    def reuses_choice(self) -> bool:
        """True if it attends to the tokens that a previous layer chose."""
        return self.indexer is not None and self.indexer.reused

    def is_sparse(self, length: int) -> bool:
        """Tell whether a sparse core, which reads only the chosen tokens, takes fewer operations than a dense one."""
        return self.core_flops(length) < self._dense_flops(length)

    def core_flops(self, length: int) -> float:
        """Forward operations per token of the attention core, sparse or dense, whichever takes fewer.

        A sparse core gathers the chosen tokens as latent vectors, which all heads share, and does not up-project them.
        """
        if self.indexer is None:
            return self._dense_flops(length)
        chosen = 2 * self.indexer.keys_per_token(length) * self.heads * (2 * self.rank + self.rotary)
        return min(chosen, self._dense_flops(length))

    def _dense_flops(self, length: int) -> float:
        return length * (self.queries + self.values)


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated DeltaNet (Yang et al., arXiv:2412.06464), as in Qwen3-Next, with a key x value state per head."""

    key_heads: int
    value_heads: int
    key: int
    """Width of a key."""
    value: int
    """Width of a value."""
    kernel: int
    """Kernel size of the convolution, in tokens."""

    @property
    def convolution_width(self) -> int:
        """Width of the convolution's input: queries, keys and values."""
        return 2 * self.key_heads * self.key + self.values

    @property
    def heads(self) -> int:
        """Number of heads, which have a state each."""
        return self.value_heads

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value

    @property
    def projection_width(self) -> int:
        """Width of the projections: queries, keys, values, output gates, and decay and step of every head."""
        return self.convolution_width + self.values + 2 * self.value_heads

    def parameters(self, hidden: int) -> int:
        """Parameters of projections, convolution, decays and the gated norm."""
        return (
            hidden * (self.projection_width + self.values)
            + self.kernel * self.convolution_width
            + 2 * self.value_heads
            + self.value
        )

    @property
    def flops(self) -> float:
        """Forward operations per token of the core, in chunks of `CHUNK` tokens.

        A head reads its state for the old value and for the output and updates it (6 key x value); within a chunk it
        multiplies queries and keys with keys, and the scores with values.
        """
        return self.value_heads * (6.0 * self.key * self.value + 2 * CHUNK * (2 * self.key + self.value))

    @property
    def traffic(self) -> float:
        """Numbers per token that the core's kernels read and write in the forward.

        These are the state of every chunk, queries, keys, values, and the chunks' intermediate results.
        """
        return self.value_heads * (2 * self.key * self.value / CHUNK + 6 * self.key + 4 * self.value)


@dataclass(frozen=True, kw_only=True)
class StateSpace:
    """Mamba-2 (Dao and Gu, arXiv:2405.21060): a state of `state` x `head_dim` per head."""

    heads: int
    head_dim: int
    state: int
    groups: int
    """Groups of heads that share their input and output matrices."""
    kernel: int
    """Kernel size of the convolution, in tokens."""
    chunk: int
    """Tokens per chunk of the scan."""
    conv_bias: bool = True
    bias: bool = False
    normed: bool = True
    """True if there is a gated norm on the output."""

    @property
    def values(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def convolution_width(self) -> int:
        """Width of the convolution's input: x, and the input and output matrices B and C."""
        return self.values + 2 * self.groups * self.state

    @property
    def projection_width(self) -> int:
        """Width of the projection: a gate, the convolution's input, and the step of every head."""
        return self.values + self.convolution_width + self.heads

    def parameters(self, hidden: int) -> int:
        """Parameters of projections, convolution, steps, decays, skips and the gated norm."""
        projections = hidden * (self.projection_width + self.values) + self.bias * (self.projection_width + hidden)
        return (
            projections
            + (self.kernel + self.conv_bias) * self.convolution_width
            + 3 * self.heads
            + self.normed * self.values
        )

    @property
    def flops(self) -> float:
        """Forward operations per token of the core, in chunks (section 6 of the paper).

        These are a chunk's scores per group, scores times inputs per head, and the state's input and output.
        """
        scores = 2.0 * self.chunk * self.state * self.groups
        return scores + self.heads * (2.0 * self.chunk * self.head_dim + 4 * self.state * self.head_dim)


CHUNK = 64
"""Tokens per chunk of flash-linear-attention's kernels."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Attention and a state space in parallel, whose outputs are added (Falcon-H1)."""

    attention: Attention
    space: StateSpace


AnyRecurrence = LinearAttention | StateSpace | Recurrence
Mixer = Attention | LatentAttention | AnyRecurrence | Parallel
