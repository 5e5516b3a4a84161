"""The units of GPT-2."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from torch import Tensor, nn

from debubble.models.config import ModelConfig
from debubble.runtime.memory.recomputation import Operators
from debubble.runtime.models.attention.core import attention
from debubble.runtime.models.attention.slices import LayerSlice, on_exact_storage
from debubble.runtime.models.loss import embed
from debubble.runtime.models.units import MicroBatch, UnitModule, norm, residual
from debubble.runtime.operators import Linear, activation, look_up


class Gpt2Embedding(UnitModule):
    """Token embeddings plus learned position embeddings."""

    prefix = "transformer."
    columns = ("wte",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.hidden)
        self.wpe = nn.Embedding(config.positions, config.hidden)
        self.p = config.embedding_dropout

    def forward(self, tokens: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map tokens [rows, length] to hidden states [rows, length, hidden]."""
        y: Tensor = op(
            "embedding", partial(self._embed, positions=micro_batch.positions, first=micro_batch.first_position), tokens
        )
        return self.drop(y, self.p, micro_batch, op, 0)

    def _embed(self, tokens: Tensor, positions: Tensor | None, first: int) -> Tensor:
        of_tokens = embed(tokens, self.wte, self.group)
        if positions is None:
            return of_tokens + self.wpe.weight[first : first + tokens.shape[-1]]
        return of_tokens + look_up(positions, self.wpe.weight)


class _Gpt2Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_attn = Linear(config.hidden, 3 * config.hidden, bias=True, transposed=True)
        self.c_proj = Linear(config.hidden, config.hidden, bias=True, transposed=True)


class Gpt2Attention(UnitModule):
    """x + dropout(c_proj(core(c_attn(norm(x)))))."""

    columns = ("attn.c_attn",)
    rows = ("attn.c_proj",)
    fused = MappingProxyType({"attn.c_attn": 3})

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.prefix, self.half_of = f"transformer.h.{layer}.", layer
        self.salt = 2 * layer + 1
        self.config = config
        self.ln_1 = norm(config)
        self.attn = _Gpt2Attention(config)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map hidden states [rows, length, hidden] to hidden states of the same shape."""
        h = op("norm", self.ln_1, x)
        layer = self.slice_of(micro_batch)
        q, k, v = op("projections", partial(self._project, layer=layer), h)
        p = self.config.attention_dropout if self.training else 0.0
        core = partial(
            attention, documents=micro_batch.documents, dropout=p, seed=self.seed(micro_batch, 0),
            first_head=self.group.group_rank * q.shape[1], context=self.context, layer=layer,
        )  # fmt: skip
        y = op("output", partial(self.group.row_parallel, layer=self.attn.c_proj), op("core", core, q, k, v))
        return residual(x, self.drop(y, self.config.residual_dropout, micro_batch, op, 1), op)

    def _project(self, h: Tensor, layer: LayerSlice | None) -> tuple[Tensor, ...]:
        (qkv,) = self.group.column_parallel(h, [self.attn.c_attn])
        q, k, v = qkv.view(*qkv.shape[:-1], 3, -1, self.config.head_dim).transpose(1, 3).unbind(2)
        return (q, k, v) if layer is None else (on_exact_storage(q), *layer.save(k, v))


class _Gpt2Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.hidden, config.ffn, bias=True, transposed=True)
        self.c_proj = Linear(config.ffn, config.hidden, bias=True, transposed=True)


class Gpt2Mlp(UnitModule):
    """x + dropout(c_proj(activation(c_fc(norm(x)))))."""

    columns = ("mlp.c_fc",)
    rows = ("mlp.c_proj",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.prefix, self.half_of = f"transformer.h.{layer}.", layer
        self.salt = 2 * layer + 2
        self.ln_2 = norm(config)
        self.mlp = _Gpt2Mlp(config)
        self.activation = activation(config.activation)
        self.p = config.residual_dropout

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map hidden states [rows, length, hidden] to hidden states of the same shape."""
        h = op("norm", self.ln_2, x)
        (inner,) = op("projections", partial(self.group.column_parallel, layers=[self.mlp.c_fc]), h)
        y = op(
            "output", partial(self.group.row_parallel, layer=self.mlp.c_proj), op("activation", self.activation, inner)
        )
        return residual(x, self.drop(y, self.p, micro_batch, op, 0), op)
