"""The units of a transformer: embedding, attention half-layer, MLP half-layer, head.

Every unit calls its operators by name through `op` (see tape.py): `norm`, `projections`, `core`, `activation`,
`multiply` are those that a plan can choose to recompute; `full` means all.  Parameters have Hugging Face's names
after the unit's `prefix`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from debubble.runtime.operators import (
    Linear,
    RMSNorm,
    activation,
    attention,
    drop,
    rotary_table,
    rotate,
    token_loss,
)
from debubble.runtime.shape import Shape
from debubble.runtime.tape import Operators


@dataclass(frozen=True)
class MicroBatch:
    """What a unit may need beside its input: the targets [rows, length], what to scale the loss by, a seed."""

    targets: Tensor | None = None
    scale: float = 1.0
    seed: int = 0


class Unit(nn.Module):
    """One unit; `forward(x, micro_batch, op)` maps the unit's input to its output."""

    prefix = ""
    """What Hugging Face puts before the names of the unit's parameters."""
    salt = 0
    """Tells the units' random numbers apart."""

    def drop(self, x: Tensor, p: float, micro_batch: MicroBatch, op: Operators, place: int) -> Tensor:
        """Dropout in training; its mask depends on the step, the unit, the micro-batch and the place in the unit."""
        if not p or not self.training:
            return x
        dropped: Tensor = op("dropout", partial(drop, p=p, seed=self.seed(micro_batch, place)), x)
        return dropped

    def seed(self, micro_batch: MicroBatch, place: int) -> int:
        return zlib.crc32(f"{micro_batch.seed} {self.salt} {place}".encode())

    def hf_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by their Hugging Face names."""
        return {self.prefix + name: p for name, p in self.named_parameters()}


def norm(shape: Shape) -> nn.Module:
    """The family's norm over the hidden size."""
    if shape.is_gpt2:
        return nn.LayerNorm(shape.hidden, eps=shape.norm_eps)
    return RMSNorm(shape.hidden, shape.norm_eps)


class LlamaEmbedding(Unit):
    """The table's rows of the tokens."""

    prefix = "model."

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)

    def forward(self, tokens: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        y: Tensor = op("embedding", self.embed_tokens, tokens)
        return y


class Gpt2Embedding(Unit):
    """The table's rows of the tokens, plus those of their positions."""

    prefix = "transformer."

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.hidden)
        self.wpe = nn.Embedding(shape.positions, shape.hidden)
        self.p = shape.embedding_dropout

    def forward(self, tokens: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        y: Tensor = op("embedding", self._embed, tokens)
        return self.drop(y, self.p, micro_batch, op, 0)

    def _embed(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.wte(tokens) + self.wpe.weight[: tokens.shape[-1]]
        return y


class _LlamaProjections(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden, width, bias=shape.qkv_bias)
        self.k_proj = Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
        self.v_proj = Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
        self.o_proj = Linear(width, shape.hidden, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)


class LlamaAttention(Unit):
    """x + o(core(rotate(q(n)), rotate(k(n)), v(n))) with n = norm(x)."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.prefix = f"model.layers.{layer}."
        self.salt = 2 * layer + 1
        self.shape = shape
        self.input_layernorm = norm(shape)
        self.self_attn = _LlamaProjections(shape)
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        h = op("norm", self.input_layernorm, x)
        q, k, v = op("projections", self._project, h)
        p = self.shape.attention_dropout if self.training else 0.0
        core = partial(attention, window=self.shape.window, dropout=p, seed=self.seed(micro_batch, 0))
        a = op("core", core, q, k, v).transpose(1, 2).flatten(2)
        y: Tensor = op("output", self.self_attn.o_proj, a) + x
        return y

    def _project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attn, size = self.self_attn, self.shape.head_dim
        q, k, v = (p(h).unflatten(-1, (-1, size)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        if self.shape.qk_norm:
            q, k = attn.q_norm(q), attn.k_norm(k)
        table = self._rotary(h)
        return rotate(q.transpose(1, 2), *table), rotate(k.transpose(1, 2), *table), v.transpose(1, 2)

    def _rotary(self, h: Tensor) -> tuple[Tensor, Tensor]:
        table = self._table
        if table is None or len(table[0]) != h.shape[1] or table[0].dtype != h.dtype or table[0].device != h.device:
            assert self.shape.rope is not None
            with torch.no_grad():
                self._table = table = rotary_table(self.shape.rope, self.shape.head_dim, h.shape[1], h)
        return table


class _Gpt2Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_attn = Linear(shape.hidden, 3 * shape.hidden, bias=True, transposed=True)
        self.c_proj = Linear(shape.hidden, shape.hidden, bias=True, transposed=True)


class Gpt2Attention(Unit):
    """x + dropout(c_proj(core(c_attn(norm(x)))))."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.prefix = f"transformer.h.{layer}."
        self.salt = 2 * layer + 1
        self.shape = shape
        self.ln_1 = norm(shape)
        self.attn = _Gpt2Attention(shape)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        h = op("norm", self.ln_1, x)
        q, k, v = op("projections", self._project, h)
        p = self.shape.attention_dropout if self.training else 0.0
        a = op("core", partial(attention, dropout=p, seed=self.seed(micro_batch, 0)), q, k, v)
        y = op("output", self.attn.c_proj, a.transpose(1, 2).flatten(2))
        return self.drop(y, self.shape.residual_dropout, micro_batch, op, 1) + x

    def _project(self, h: Tensor) -> tuple[Tensor, ...]:
        qkv = self.attn.c_attn(h).unflatten(-1, (3, self.shape.heads, self.shape.head_dim))
        return tuple(t.transpose(1, 2) for t in qkv.unbind(2))


class _LlamaMlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.ffn, bias=shape.mlp_bias)
        self.up_proj = Linear(shape.hidden, shape.ffn, bias=shape.mlp_bias)
        self.down_proj = Linear(shape.ffn, shape.hidden, bias=shape.mlp_bias)


class LlamaMlp(Unit):
    """x + down(activation(gate(n)) up(n)) with n = norm(x)."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.prefix = f"model.layers.{layer}."
        self.salt = 2 * layer + 2
        self.post_attention_layernorm = norm(shape)
        self.mlp = _LlamaMlp(shape)
        self.activation = activation(shape.activation)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        h = op("norm", self.post_attention_layernorm, x)
        gate = op("projections", self.mlp.gate_proj, h)
        up = op("projections", self.mlp.up_proj, h)
        product = op("multiply", torch.mul, op("activation", self.activation, gate), up)
        y: Tensor = op("output", self.mlp.down_proj, product) + x
        return y


class _Gpt2Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = Linear(shape.hidden, shape.ffn, bias=True, transposed=True)
        self.c_proj = Linear(shape.ffn, shape.hidden, bias=True, transposed=True)


class Gpt2Mlp(Unit):
    """x + dropout(c_proj(activation(c_fc(norm(x)))))."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.prefix = f"transformer.h.{layer}."
        self.salt = 2 * layer + 2
        self.ln_2 = norm(shape)
        self.mlp = _Gpt2Mlp(shape)
        self.activation = activation(shape.activation)
        self.p = shape.residual_dropout

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        h = op("norm", self.ln_2, x)
        a = op("activation", self.activation, op("projections", self.mlp.c_fc, h))
        y = op("output", self.mlp.c_proj, a)
        return self.drop(y, self.p, micro_batch, op, 0) + x


class Head(Unit):
    """Final norm, logits, and the loss if there are targets (else the logits are the output)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_name = "transformer.ln_f." if shape.is_gpt2 else "model.norm."
        self.norm = norm(shape)
        self.lm_head = Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        h = op("norm", self.norm, x)
        logits: Tensor = op("projections", self.lm_head, h)
        if micro_batch.targets is None:
            return logits
        loss: Tensor = op("loss", partial(token_loss, targets=micro_batch.targets, scale=micro_batch.scale), logits)
        return loss

    def hf_parameters(self) -> Mapping[str, nn.Parameter]:
        norm_parameters = {self.norm_name + name: p for name, p in self.norm.named_parameters()}
        return {**norm_parameters, "lm_head.weight": self.lm_head.weight}
