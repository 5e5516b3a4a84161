"""Mixers of a layer's tokens: attention of several kinds, linear attention, state spaces."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.models.recurrences import Recurrence


def _mean_keys(length: int, *, most: int) -> float:
    """The mean number of keys of a causal sequence's tokens, each of which sees `most` at most, itself counted half."""
    most = min(most, length)
    return most * (1 - most / (2 * length))


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: the base, and how longer contexts scale the frequencies."""

    theta: float
    kind: str = "default"
    """transformers' `rope_type`."""
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention whose keys and values are shared by groups of query heads; its sizes are the model's."""

    rope: Rope | None = None
    window: int | None = None
    """Number of tokens back that it reaches, the token itself included; None: all."""
    chunk: int | None = None
    """Tokens attend within runs of so many tokens alone (Llama 4); None: all are one run."""
    causal: bool = True
    """True if tokens see only those before them; patches of an image see all."""
    gated: bool = False
    """True if the result is multiplied by a sigmoid that the queries' projection gives too (Qwen3-Next)."""
    sinks: bool = False
    """True if every head has a learned score that takes part in its softmax (gpt-oss)."""

    def keys_per_token(self, length: int) -> float:
        """Tokens that a token of a sequence attends to, on average, itself counted half."""
        run = length if self.chunk is None else min(self.chunk, length)
        if not self.causal:
            return run
        return _mean_keys(run, most=run if self.window is None else self.window)


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Small heads that choose the tokens which a token attends to (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

    heads: int
    width: int
    """Width of a query, and of the one key."""
    tokens: int
    """Tokens that are chosen at most."""
    reused: bool = False
    """True if the tokens are those that a layer before has chosen (`shared` in GLM-5's indexer_types)."""

    def parameters(self, hidden: int, query_rank: int) -> int:
        """Parameters of the queries, the key with its norm, and the weights of the heads."""
        if self.reused:
            return 0
        return query_rank * self.heads * self.width + hidden * (self.width + self.heads) + 2 * self.width

    def flops(self, length: int) -> float:
        """Operations per token that score all tokens before it, forward; the choice has no gradient."""
        return 0 if self.reused else length * self.heads * self.width

    def keys_per_token(self, length: int) -> float:
        """Tokens that are chosen for a token of a sequence, on average, itself counted half."""
        return _mean_keys(length, most=self.tokens)


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from one vector.

    In training the vector is expanded to keys and values of all heads.
    """

    heads: int
    query_rank: int | None
    """Width of the vector that queries are expanded from; None: the hidden state itself."""
    rank: int
    """Width of the vector that keys and values are expanded from."""
    content: int
    """Width of a query or key without its rotary part."""
    rotary: int
    """Width of the rotary part, which all keys share."""
    value: int
    """Width of a value."""
    bias: bool = False
    indexer: Indexer | None = None
    """The heads that choose the tokens which are attended to; None: all are."""

    @property
    def queries(self) -> int:
        """Width of all queries, and of all expanded keys."""
        return self.heads * (self.content + self.rotary)

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.heads * self.value

    @property
    def expansion_width(self) -> int:
        """Width of what the latent vector is expanded to: keys without their rotary part, and values."""
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
        """True if it attends to the tokens that a layer before has chosen."""
        return self.indexer is not None and self.indexer.reused

    def is_sparse(self, length: int) -> bool:
        """Tell whether a core that reads the chosen tokens alone has less to compute than one that reads all."""
        return self.core_flops(length) < self._dense_flops(length)

    def core_flops(self, length: int) -> float:
        """Operations per token of the attention core, forward, in whichever form has fewer.

        Chosen tokens are gathered as latent vectors, which all heads share, and not expanded.
        """
        if self.indexer is None:
            return self._dense_flops(length)
        chosen = 2 * self.indexer.keys_per_token(length) * self.heads * (2 * self.rank + self.rotary)
        return min(chosen, self._dense_flops(length))

    def _dense_flops(self, length: int) -> float:
        return length * (self.queries + self.values)


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated DeltaNet (Yang et al., arXiv:2412.06464), as in Qwen3-Next: a state of keys x values per head."""

    key_heads: int
    value_heads: int
    key: int
    """Width of a key."""
    value: int
    """Width of a value."""
    kernel: int
    """Tokens that the convolution before it sees."""

    @property
    def convolution_width(self) -> int:
        """Width of queries, keys and values, which pass a convolution."""
        return 2 * self.key_heads * self.key + self.values

    @property
    def heads(self) -> int:
        """Heads that have a state each."""
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
        """Operations per token of the core, forward, in chunks of `CHUNK` tokens.

        A head reads its state for the old value and for the result and adds to it (6 key x value), and multiplies
        queries and keys of a chunk with its keys, and the scores with its values.
        """
        return self.value_heads * (6.0 * self.key * self.value + 2 * CHUNK * (2 * self.key + self.value))

    @property
    def traffic(self) -> float:
        """Numbers per token that the core's kernels read and write, forward.

        The state of every chunk, and queries, keys, values and what the chunks make of them.
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
    """Tokens that the convolution before it sees."""
    chunk: int
    """Tokens that are computed at once."""
    conv_bias: bool = True
    bias: bool = False
    normed: bool = True
    """True if the result passes a gated norm."""

    @property
    def values(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def convolution_width(self) -> int:
        """Width of what passes a convolution: the inputs, and their input and output matrices."""
        return self.values + 2 * self.groups * self.state

    @property
    def projection_width(self) -> int:
        """Width of the projection: a gate, what is mixed, and the step of every head."""
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
        """Operations per token of the core, forward, in chunks (section 6 of the paper).

        Scores of a chunk per group, scores times inputs per head, and the state's input and output.
        """
        scores = 2.0 * self.chunk * self.state * self.groups
        return scores + self.heads * (2.0 * self.chunk * self.head_dim + 4 * self.state * self.head_dim)


CHUNK = 64
"""Tokens that flash-linear-attention's kernels compute at once."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Attention and a state space that see the same hidden states, and whose results are added (Falcon-H1)."""

    attention: Attention
    space: StateSpace


AnyRecurrence = LinearAttention | StateSpace | Recurrence
Mixer = Attention | LatentAttention | AnyRecurrence | Parallel
