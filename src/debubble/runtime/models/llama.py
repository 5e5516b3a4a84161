"""The units of Llama and similar families: Mistral, Qwen, Gemma."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from debubble.models.config import ModelConfig
from debubble.models.mixers import Attention
from debubble.runtime.memory.recomputation import Operators
from debubble.runtime.models.attention.core import attention, rotary_table, rotate
from debubble.runtime.models.attention.slices import LayerSlice
from debubble.runtime.models.compilation import Compiler
from debubble.runtime.models.loss import embed
from debubble.runtime.models.units import MicroBatch, UnitModule, norm, residual
from debubble.runtime.operators import GatedProduct, Linear, RMSNorm, activation, gated


class LlamaEmbedding(UnitModule):
    """Token embeddings, scaled in some families."""

    prefix = "model."
    columns = ("embed_tokens",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Without `_weight`, `nn.Embedding` would draw from torch's global generator.
        empty = torch.empty(config.vocab, config.hidden)
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden, config.padding, _weight=empty)
        self.scale = config.embedding_scale

    def forward(self, tokens: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map tokens [rows, length] to hidden states [rows, length, hidden]."""
        y: Tensor = op("embedding", self._embed, tokens)
        return y

    def _embed(self, tokens: Tensor) -> Tensor:
        y = embed(tokens, self.embed_tokens, self.group)
        # As in pretraining, the scale is rounded to the run's dtype.
        return y if self.scale == 1 else y * float(torch.tensor(self.scale, dtype=torch.float32).to(y.dtype))


class _Projections(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, width, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(width, config.hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, offset=config.norm_offset)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, offset=config.norm_offset)


class LlamaAttention(UnitModule):
    """x + o(core(rotate(q(n)), rotate(k(n)), v(n))) with n = norm(x); Gemma 2 and 3 normalise the summand too."""

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    rows = ("self_attn.o_proj",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.prefix, self.half_of = f"model.layers.{layer}.", layer
        self.salt = 2 * layer + 1
        mixer = config.per_layer[layer].attention
        assert isinstance(mixer, Attention)
        self.config, self.layer = config, mixer
        self.input_layernorm = norm(config)
        self.self_attn = _Projections(config)
        self.post_attention_layernorm = norm(config) if config.norms_results else None
        self.rotate = rotate
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map hidden states [rows, length, hidden] to hidden states of the same shape."""
        layer = self.slice_of(micro_batch)
        project = partial(self._project, positions=micro_batch.positions, first=micro_batch.first_position, layer=layer)
        q, k, v = op("projections", project, op("norm", self.input_layernorm, x))
        config = self.config
        core = partial(
            attention, scale=config.attention_scale, window=self.layer.window, documents=micro_batch.documents,
            cap=config.attention_cap,
            dropout=config.attention_dropout if self.training else 0.0, seed=self.seed(micro_batch, 0),
            first_head=self.group.group_rank * q.shape[1], context=self.context, layer=layer,
        )  # fmt: skip
        y = op("output", partial(self.group.row_parallel, layer=self.self_attn.o_proj), op("core", core, q, k, v))
        if self.post_attention_layernorm is not None:
            y = op("output", self.post_attention_layernorm, y)
        return residual(x, y, op)

    def _project(
        self, h: Tensor, positions: Tensor | None, first: int, layer: LayerSlice | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attn, size = self.self_attn, self.config.head_dim
        flat = self.group.column_parallel(h, [attn.q_proj, attn.k_proj, attn.v_proj])
        q, k, v = (t.view(*t.shape[:-1], -1, size) for t in flat)
        if self.config.qk_norm:
            q, k = (norm(t, self.group.copy_to_group(norm.weight)) for norm, t in ((attn.q_norm, q), (attn.k_norm, k)))
        table = self._rotary(h, positions, first)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = (self.rotate(t, *table) for t in (q, k))
        return q, *((k, v) if layer is None else layer.save(k, v))

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile norms and rotations."""
        super().compile_functions(compiled)
        self.rotate = compiled(rotate)

    @torch.no_grad()
    def _rotary(self, h: Tensor, positions: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the positions; the table of consecutive ones, from `first`, is cached."""
        assert self.layer.rope is not None
        if positions is not None:
            return rotary_table(self.layer.rope, self.config.head_dim, positions[:, None], h)
        table, length = self._table, first + h.shape[1]
        if table is None or len(table[0]) < length or table[0].dtype != h.dtype or table[0].device != h.device:
            consecutive = torch.arange(length, device=h.device)
            self._table = table = rotary_table(self.layer.rope, self.config.head_dim, consecutive, h)
        return table[0][first:length], table[1][first:length]


class _Gated(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.down_proj = Linear(config.ffn, config.hidden, bias=config.mlp_bias)


class GatedUnit(UnitModule):
    """A unit with products activation(gate) up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = activation(config.activation)
        self.gated: Callable[[Tensor, Tensor], Tensor] = partial(GatedProduct.apply, self.activation)

    def product(self, gate: Tensor, up: Tensor, op: Operators) -> Tensor:
        """Compute activation(gate) up, as one operator that saves gate and up only."""
        y: Tensor = op("multiply", self.gated, gate, up)
        return y

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile norms and the product."""
        super().compile_functions(compiled)
        self.gated = compiled(gated(self.activation))


class LlamaMlp(GatedUnit):
    """x + down(activation(gate(n)) up(n)) with n = norm(x)."""

    columns = ("mlp.gate_proj", "mlp.up_proj")
    rows = ("mlp.down_proj",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config)
        self.prefix, self.half_of = f"model.layers.{layer}.", layer
        self.salt = 2 * layer + 2
        self.post_attention_layernorm = norm(config)
        self.mlp = _Gated(config)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map hidden states [rows, length, hidden] to hidden states of the same shape."""
        h = op("norm", self.post_attention_layernorm, x)
        return residual(x, self.body(h, op), op)

    def body(self, h: Tensor, op: Operators) -> Tensor:
        """The gated MLP without norm and residual addition."""
        gate, up = op(
            "projections", partial(self.group.column_parallel, layers=[self.mlp.gate_proj, self.mlp.up_proj]), h
        )
        y: Tensor = op("output", partial(self.group.row_parallel, layer=self.mlp.down_proj), self.product(gate, up, op))
        return y


class GemmaMlp(LlamaMlp):
    """x + norm(down(activation(gate(n)) up(n))) with n = norm(x) (Gemma 2 and 3), whose norms have other names."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        del self.post_attention_layernorm
        self.pre_feedforward_layernorm = norm(config)
        self.post_feedforward_layernorm = norm(config)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map hidden states [rows, length, hidden] to hidden states of the same shape."""
        h = op("norm", self.pre_feedforward_layernorm, x)
        return residual(x, op("output", self.post_feedforward_layernorm, self.body(h, op)), op)
