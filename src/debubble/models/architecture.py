"""The architecture of a model: its sizes and layers, on which costs and modules depend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from debubble.ir import InputError, PlannedUnit
from debubble.models.mixers import Attention, LatentAttention, LinearAttention, Mixer, Parallel, StateSpace
from debubble.models.recurrences import Recurrence

Norm = Literal["rmsnorm", "layernorm"]

MEASURED_FAMILIES = frozenset({"deepseek_v3", "kimi_k2", "qwen3_next"})
"""Families, of those priced by their operators, with predictions of published runs in docs/notes/measured.md."""


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A dense MLP; its sizes are the model's."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP."""

    count: int
    per_token: int
    ffn: int
    """Inner width of one expert."""
    shared: int = 0
    """Inner width of the shared expert; 0: there is none."""
    shared_gate: bool = False
    """True if a gate scales the output of the shared expert."""
    bias: bool = False
    """True if experts and router have biases (gpt-oss)."""
    renormalised: bool = False
    """True if the weights of a token's experts sum to 1."""
    reach: float = 1.0
    """Fraction of the experts from which those of a token are chosen, with group-limited routing (DeepSeek-V3)."""

    def parameters(self, hidden: int, matrices: int) -> int:
        """Parameters of the routed experts, which expert parallelism shards."""
        biases = self.bias * ((matrices - 1) * self.ffn + hidden)
        return self.count * (matrices * hidden * self.ffn + biases)

    def router_parameters(self, hidden: int, matrices: int) -> int:
        """Parameters of the router and of the shared expert."""
        router = self.count * (hidden + self.bias)
        return router + matrices * hidden * self.shared + self.shared_gate * hidden


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its token mixer and its MLP or experts; None: the layer has no such half."""

    attention: Mixer | None = field(default_factory=Attention)
    mlp: Mlp | Experts | None = field(default_factory=Mlp)

    @property
    def window(self) -> int | None:
        """The sliding window of its attention in tokens, including the token itself; None: no window."""
        return self.attention.window if isinstance(self.attention, Attention) else None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A causal language model: Llama-like, GPT-2 (`positions` set), or with other token mixers."""

    family: str
    """Hugging Face's `model_type`."""
    per_layer: tuple[Layer, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Inner width of the MLP."""
    vocab: int
    gated: bool = True
    """True if the MLP multiplies by a gate (SwiGLU, GeGLU)."""
    tied: bool = False
    """True if the head uses the embedding's table."""
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    """A number that norms add to their weights (Gemma: 1)."""
    norms_results: bool = False
    """True if a half-layer has a second norm on its output (Gemma 2 and 3)."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the projection after the attention core."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every query and key head."""
    positions: int = 0
    """Number of learned position embeddings; 0: rotary."""
    padding: int | None = None
    """Token whose embedding has no gradient."""
    activation: str = "silu"
    initializer_range: float = 0.02
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """The factor of the scores; None: 1 / sqrt(head_dim)."""
    attention_cap: float | None = None
    """Scores x become cap tanh(x / cap)."""
    logit_cap: float | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    router_balance: float = 0.0
    """Coefficient of the routers' auxiliary loss; 0: no such loss."""
    mtp_layers: int = 0
    """Multi-token-prediction layers, each like the last layer (DeepSeek-V3, arXiv:2412.19437, 2.2)."""
    vision: VisionTower | None = None
    """The vision tower before the embedding, which turns images into tokens."""
    language: str = ""
    """The family of the language model if there is a vision tower."""
    whole_layers: bool = False
    """True if a layer is one unit, not two halves; the runtime then runs transformers' modules."""
    beyond_units: str | None = None
    """The config entry that debubble's units of the family do not support, so that `whole_layers` is set; else None."""
    known: bool = True
    """True if the parameter counts of its family were compared with transformers'."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"A model's {name} must be at least 1, not {getattr(self, name)}.")
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads:"
                " the first number must be a multiple of the second."
            )
        if self.experts is not None and not 1 <= self.experts.per_token <= self.experts.count:
            raise InputError(
                f"{self.experts.per_token} experts per token is impossible with {self.experts.count} experts."
            )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.per_layer)

    @property
    def units(self) -> tuple[PlannedUnit, ...]:
        """The units that a partition assigns to stages, in model order.

        These are the vision tower's layers, the embedding, one or two units per layer, MTP modules and the head.
        """
        tower = (PlannedUnit("vision", None),) * (0 if self.vision is None else self.vision.tower.layers)
        types = ("layer",) if self.whole_layers else ("attention", "mlp")
        inner = (PlannedUnit(type_, layer) for layer in range(self.layers) for type_ in types)
        mtp = (PlannedUnit("mtp", None),) * self.mtp_layers
        return (*tower, PlannedUnit("embedding", None), *inner, *mtp, PlannedUnit("head", None))

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has some; None for a dense model."""
        return next((layer.mlp for layer in self.per_layer if isinstance(layer.mlp, Experts)), None)

    @property
    def is_gpt2(self) -> bool:
        """True if positions are learned, as in GPT-2."""
        return self.positions > 0

    @property
    def dropout(self) -> bool:
        """True if training uses dropout."""
        return any((self.embedding_dropout, self.attention_dropout, self.residual_dropout))

    @property
    def remark(self) -> str | None:
        """Sentences for users on how its costs are derived, or None."""
        remarks = []
        if not self.known:
            remarks.append(
                f"debubble does not know '{self.family}' and takes it for a Llama of its sizes, with"
                f" {self.parameters / 1e9:.2f} B parameters: if that is not the published number, give its units with"
                " --units, or measure them with `debubble profile`."
            )
        elif self.beyond_units is not None:
            remarks.append(
                f"'{self.family}' runs with transformers' modules, in whole layers, because debubble's own do not know"
                f" the entry '{self.beyond_units}' of its config: remove the entry if it changes nothing."
            )
        elif self.whole_layers and all(isinstance(layer.attention, Attention) for layer in self.per_layer):
            remarks.append(
                f"'{self.family}' is priced as a Llama of its sizes, in whole layers; `debubble profile` measures what"
                " they really take."
            )
        elif self.whole_layers:
            measured = "" if self.family in MEASURED_FAMILIES else "; these prices were not held against measurements"
            remarks.append(f"'{self.family}' is priced by its operators, in whole layers{measured}.")
        if self.parts is not None:
            remarks.append(f"'{self.family}' is {self.parts}, {self.vision_use}.")
        if self.mtp_layers:
            remarks.append(
                f"Predicting {self.mtp_layers} further tokens is planned too, as units of type mtp; set"
                " num_nextn_predict_layers to 0 to train without."
            )
        return " ".join(remarks) or None

    @property
    def parts(self) -> str | None:
        """A phrase on the language model and the vision tower; None if it has no tower."""
        if self.vision is None:
            return None
        tower, parameters = self.vision.tower, self.vision.parameters
        return (
            f"a language model ({self.language}, {(self.parameters - parameters) / 1e9:.1f} B parameters) and a vision"
            f" tower ({self.vision.kind}, {tower.layers} layers of hidden size {tower.hidden},"
            f" {parameters / 1e9:.2f} B)"
        )

    @property
    def vision_use(self) -> str | None:
        """A phrase on the use of the vision tower in a plan; None if it has no tower."""
        if self.vision is None:
            return None
        trained = "which is planned and trained too" if self.vision.trained else "which is planned too, and frozen"
        number, size = self.vision.images, f"{self.vision.patches:,} patches ({self.vision.tokens:,} tokens)"
        images = f"one image of {size}" if number == 1 else f"{number} images of {size} each"
        return f"{trained}, with {images} per sequence"

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads (and of all value heads) together."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Weight matrices of one MLP."""
        return 3 if self.gated else 2

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def half_layer_norms(self) -> int:
        """Norms of one half-layer."""
        return 2 if self.norms_results else 1

    def core_flops(self, layer: int, length: int) -> float:
        """Forward operations per token of a layer's token mixer, without projections."""
        mixer = self.per_layer[layer].attention
        return 0 if mixer is None else self._mixer_flops(mixer, length)

    def _mixer_flops(self, mixer: Mixer, length: int) -> float:
        match mixer:
            case Attention() as attention:
                return 4 * attention.keys_per_token(length) * self.attention_width
            case LatentAttention() as latent:
                return latent.core_flops(length)
            case Parallel(attention=attention, space=space):
                return self._mixer_flops(attention, length) + space.flops
            case LinearAttention() | StateSpace() | Recurrence() as recurrence:
                return recurrence.flops

    def is_moe(self, layer: int) -> bool:
        """Tell whether a layer has a mixture of experts."""
        return isinstance(self.per_layer[layer].mlp, Experts)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the tables of tokens and of learned positions."""
        return (self.vocab + self.positions) * self.hidden

    def attention_parameters(self, layer: int) -> int:
        """Parameters of a layer's token mixer, including its norm."""
        mixer = self.per_layer[layer].attention
        return 0 if mixer is None else self._mixer_parameters(mixer) + self.half_layer_norms * self.norm_parameters

    def _mixer_parameters(self, mixer: Mixer) -> int:
        h, q, kv = self.hidden, self.attention_width, self.kv_width
        match mixer:
            case Attention() as attention:
                bias = self.qkv_bias * ((1 + attention.gated) * q + 2 * kv) + self.output_bias * h
                extra = self.qk_norm * 2 * self.head_dim + attention.sinks * self.heads
                return (2 + attention.gated) * h * q + 2 * h * kv + bias + extra
            case Parallel(attention=attention, space=space):
                return self._mixer_parameters(attention) + space.parameters(h)
            case other:
                return other.parameters(h)

    def mlp_parameters(self, layer: int) -> int:
        """Parameters of an MLP half-layer, including norm, router and experts."""
        h, n = self.hidden, self.matrices
        match self.per_layer[layer].mlp:
            case None:
                return 0
            case Experts() as experts:
                return experts.parameters(h, n) + experts.router_parameters(h, n) + self.norm_parameters
            case Mlp():
                bias = self.mlp_bias * ((n - 1) * self.ffn + h)
                return n * h * self.ffn + bias + self.half_layer_norms * self.norm_parameters

    def expert_parameters(self, layer: int) -> int:
        """Parameters of the routed experts of an MLP half-layer, which expert parallelism shards."""
        mlp = self.per_layer[layer].mlp
        return mlp.parameters(self.hidden, self.matrices) if isinstance(mlp, Experts) else 0

    def attention_matrices(self, layer: int) -> tuple[int, ...]:
        """Sizes of the linear layers of an attention half-layer, without biases; () for other token mixers."""
        attention = self.per_layer[layer].attention
        if not isinstance(attention, Attention):
            return ()
        widths = ((1 + attention.gated) * self.attention_width, self.kv_width, self.kv_width)
        projections = (sum(widths),) if self.qkv_layers == 1 else widths
        return tuple(self.hidden * width for width in (*projections, self.attention_width))

    def mlp_matrices(self, layer: int) -> tuple[int, ...]:
        """Sizes of the linear layers of a dense MLP half-layer, without biases; () for a mixture of experts."""
        return (self.hidden * self.ffn,) * self.matrices if isinstance(self.per_layer[layer].mlp, Mlp) else ()

    def layer_parameters(self, layer: int) -> int:
        """Parameters of both halves of a layer."""
        return self.attention_parameters(layer) + self.mlp_parameters(layer)

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm and the head's table, which a separate last stage copies if it is tied."""
        return self.vocab * self.hidden + self.norm_parameters

    @property
    def mtp_parameters(self) -> int:
        """Parameters of an MTP module: a layer, norms and a projection of two hidden states.

        It shares embedding and head with the model.
        """
        norms = 3 * self.norm_parameters
        return self.layer_parameters(self.layers - 1) + 2 * self.hidden**2 + norms

    @property
    def parameters(self) -> int:
        """Parameters of the model without MTP modules; a tied table counts once."""
        table = self.vocab * self.hidden if self.tied else 0
        vision = 0 if self.vision is None else self.vision.parameters
        return vision + self.embedding_parameters + self.matrix_parameters(0) + self.head_parameters - table

    @property
    def qkv_layers(self) -> int:
        """Linear layers before the attention core: one in GPT-2, else three."""
        return 1 if self.positions else 3

    def attention_adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on one attention half-layer."""
        h, q = self.hidden, self.attention_width
        return rank * (self.qkv_layers * h + q + 2 * self.kv_width + q + h)

    def mlp_adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on one MLP half-layer; 0 in a mixture of experts, which adapts only attention."""
        return 0 if self.experts is not None else rank * self.matrices * (self.hidden + self.ffn)

    def trained_parameters(self, rank: int) -> int:
        """Trained parameters: those of adapters of this rank, or for rank 0 all but those of a frozen tower."""
        if rank:
            return self.layers * (self.attention_adapters(rank) + self.mlp_adapters(rank))
        return self.parameters - self.frozen_parameters

    @property
    def frozen_parameters(self) -> int:
        """Parameters of a vision tower that is frozen."""
        return 0 if self.vision is None or self.vision.trained else self.vision.parameters

    def matrix_parameters(self, rank: int) -> int:
        """Trained parameters in layers, whose matrices Muon orthogonalizes; their few norms and biases are included."""
        if rank:
            return self.trained_parameters(rank)
        return sum(self.layer_parameters(layer) for layer in range(self.layers))

    @property
    def active_parameters(self) -> int:
        """Active parameters per token: of the experts only those that a token is routed to."""
        idle = 0
        for layer in range(self.layers):
            if isinstance(experts := self.per_layer[layer].mlp, Experts):
                idle += self.expert_parameters(layer) // experts.count * (experts.count - experts.per_token)
        return self.parameters - idle


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """An image encoder, whose outputs replace some of the language model's tokens."""

    kind: str
    """Name of the encoder's architecture."""
    tower: Architecture
    """The tower's layers."""
    patches: int
    """Patches per image in its layers."""
    merged: int
    """Patches per token of the language model."""
    sizes: Literal["one", "up to", "any"]
    """Accepted images: of exactly `patches`, of up to `patches`, or of any size."""
    embedding_parameters: int
    """Parameters before its layers."""
    projector_parameters: int
    """Parameters after its layers, up to the language model's hidden size."""
    trained: bool = True
    """False if its parameters are frozen."""
    images: int = 1
    """Images per sequence."""

    @property
    def tokens(self) -> int:
        """Tokens of the language model per image."""
        return self.patches // self.merged

    @property
    def parameters(self) -> int:
        """Parameters of the tower, including embedding and projector."""
        return self.embedding_parameters + self.tower.matrix_parameters(0) + self.projector_parameters

    @property
    def flops(self) -> float:
        """Forward operations per image."""
        cores = sum(self.tower.core_flops(layer, self.patches) for layer in range(self.tower.layers))
        return self.patches * (2 * self.parameters + cores)
