"""The base class of units, and the head; other units are in llama.py, experts.py, gpt2.py, modules.py and hf.

Every unit calls its operators by name through `op` (see memory/recomputation.py).  A plan can recompute `norm`,
`projections`, `core`, `activation` and `multiply`, or all (`full`).  A parameter's Hugging Face name is its name after
the unit's `prefix`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from debubble.ir import InputError, PlannedUnit
from debubble.models.config import ModelConfig
from debubble.runtime.distributed.context_parallel import NO_CONTEXT_GROUP
from debubble.runtime.distributed.cuts import Cut, CutGroup
from debubble.runtime.distributed.expert_parallel import NO_EXPERT_GROUP, ExpertGroup
from debubble.runtime.distributed.tensor_parallel import NO_TENSOR_GROUP, TensorGroup, column_cuts, row_cuts
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.recomputation import Operators
from debubble.runtime.models.attention.slices import LayerSlice, SequenceSlice
from debubble.runtime.models.compilation import Compiler
from debubble.runtime.models.loss import Loss, cross_entropy, divided_cross_entropy, scaled_loss
from debubble.runtime.models.routing import Routing
from debubble.runtime.operators import Linear, RMSNorm, capped, drop, rms_norm


@dataclass(frozen=True)
class MicroBatch:
    """A unit's arguments besides its input: targets [rows, length], the factor of the loss, a seed."""

    targets: Tensor | None = None
    scale: float = 1.0
    seed: int = 0
    routing: Routing | None = None
    """Sums of the routers, if they have a load-balancing loss."""
    positions: Tensor | None = None
    """Position of each token, [rows or 1, length]; None: 0, 1, 2 and so on in every row."""
    documents: Tensor | None = None
    """Number of each token's document, to which its attention is limited; None: a row is a document.

    [rows, length] of the full sequence, even if ranks shard it.
    """
    loss_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The rows of the entries that the loss requires, by name."""
    slice: SequenceSlice | None = None
    """The slice of sequences that the micro-batch is; None: full sequences."""

    @property
    def first_position(self) -> int:
        """Position of the first token, if there are no `positions`."""
        return 0 if self.slice is None else self.slice.start


def check_whole_recomputation(planned: Iterable[PlannedUnit], modules: str) -> None:
    """Raise InputError if a unit recomputes single operators; `modules` (a description) only recompute in full."""
    partial_strategy = next((s for unit in planned for s in unit.strategies if s not in ("none", "full")), None)
    if partial_strategy is not None:
        raise InputError(f"{modules} recompute in full or not at all, not '{partial_strategy}'.")


class UnitModule(nn.Module):
    """One unit of a stage; `forward(x, micro_batch, op)` maps its input to its output."""

    prefix = ""
    """Prefix of the Hugging Face names of the unit's parameters."""
    salt = 0
    """Distinguishes the units' random numbers."""
    half_of: int | None = None
    """Index of the layer of which the unit is a half; both halves may recompute together."""
    columns: tuple[str, ...] = ()
    """Column-parallel layers; embeddings are sharded by tokens."""
    rows: tuple[str, ...] = ()
    """Row-parallel layers."""
    fused: Mapping[str, int] = MappingProxyType({})
    """Number of fused layers in a column-parallel one, if it is not 1."""
    constants: frozenset[str] = frozenset()
    """Hugging Face names of frozen parameters that keep their dtype, whatever the run's."""
    group = NO_TENSOR_GROUP
    """The ranks that shard the unit."""
    context = NO_CONTEXT_GROUP
    """The ranks that shard sequences."""
    expert_group = NO_EXPERT_GROUP
    """The ranks that divide the unit's experts, if it has some."""
    ledger: Ledger | None = None
    """The ledger of the device's activations."""
    loss: Loss | None = None
    """The loss of the last unit's output, if there are targets."""

    def cuts(self) -> Mapping[str, Cut]:
        """Cuts of the parameters that tensor parallelism shards, by name; the others are replicated."""
        cuts: dict[str, Cut] = {}
        for path in self.columns:
            layer_cuts = column_cuts(self.get_submodule(path), self.fused.get(path, 1))
            cuts |= {f"{path}.{name}": cut for name, cut in layer_cuts.items()}
        for path in self.rows:
            cuts |= {f"{path}.{name}": cut for name, cut in row_cuts(self.get_submodule(path)).items()}
        return cuts

    def expert_cuts(self) -> Mapping[str, Cut]:
        """Cuts of the parameters that expert parallelism shards, by name."""
        return {}

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        """Replace the parameters by this rank's shards, and return their cuts by Hugging Face name.

        `made`: the shards so far, by full parameter, which tied units share.
        """
        self.group = group
        return self._shard_parameters(group, self.cuts(), made)

    def divide_experts(self, group: ExpertGroup) -> Mapping[str, Cut]:
        """Keep only this rank's experts, and return the cuts of their parameters by Hugging Face name."""
        self.expert_group = group
        return self._shard_parameters(group, self.expert_cuts(), {})

    def _shard_parameters(
        self, group: CutGroup, cuts: Mapping[str, Cut], made: dict[nn.Parameter, nn.Parameter]
    ) -> Mapping[str, Cut]:
        for name, cut in cuts.items():
            path, _, last = name.rpartition(".")
            parameter = self.get_parameter(name)
            if parameter not in made:
                shard = group.local_shard(parameter.detach(), cut).clone()
                made[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            setattr(self.get_submodule(path), last, made[parameter])
        return {self.hf_name(name): cut for name, cut in cuts.items()}

    def hf_name(self, name: str) -> str:
        """A parameter's Hugging Face name."""
        return self.prefix + name

    def loss_of(self, y: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """The loss of the unit's output, or the output itself if there is no loss."""
        if self.loss is None or micro_batch.targets is None:
            return y
        loss = partial(self.loss, **micro_batch.loss_inputs) if micro_batch.loss_inputs else self.loss
        of_targets = partial(scaled_loss, loss=loss, targets=micro_batch.targets, scale=micro_batch.scale)
        scaled: Tensor = op("loss", of_targets, y)
        return scaled

    def drop(self, x: Tensor, p: float, micro_batch: MicroBatch, op: Operators, place: int) -> Tensor:
        """Dropout in training, with a mask that depends on the micro-batch's seed, the unit and the place in it."""
        if not p or not self.training:
            return x
        dropped: Tensor = op("dropout", partial(drop, p=p, seed=self.seed(micro_batch, place)), x)
        return dropped

    def attach_ledger(self, ledger: Ledger) -> None:
        """Set the device's ledger, and exclude the unit's parameters and buffers from it."""
        self.ledger = ledger
        ledger.exclude((*self.parameters(), *self.buffers()))

    def slice_of(self, micro_batch: MicroBatch) -> LayerSlice | None:
        """The micro-batch's slice in this unit; None: full sequences."""
        return None if micro_batch.slice is None else micro_batch.slice.in_layer(self.salt, self.ledger)

    def linear_layers(self) -> list[Linear]:
        """The linear layers that may be quantised or multiply in 8 bits; without adapters."""
        paths = (*self.columns, *self.rows)
        return [layer for path in paths if isinstance(layer := self.get_submodule(path), Linear)]

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile functions without linear layers."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.function = compiled(rms_norm)
        if self.loss is cross_entropy:
            self.loss = compiled(cross_entropy)

    def seed(self, micro_batch: MicroBatch, place: int) -> int:
        """A 32-bit seed for one place of this unit in one micro-batch."""
        return zlib.crc32(f"{micro_batch.seed} {self.salt} {place}".encode())

    def hf_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by Hugging Face name."""
        return {self.hf_name(name): p for name, p in self.named_parameters()}


def norm(config: ModelConfig) -> nn.Module:
    """The family's norm over the hidden size."""
    if config.is_gpt2:
        return nn.LayerNorm(config.hidden, eps=config.norm_eps)
    return RMSNorm(config.hidden, config.norm_eps, offset=config.norm_offset)


def residual(x: Tensor, summand: Tensor, op: Operators) -> Tensor:
    """The residual addition, as an operator."""
    y: Tensor = op("residual", torch.add, summand, x)
    return y


class Head(UnitModule):
    """Final norm, logits, and the loss if there are targets."""

    columns = ("lm_head",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_name = "transformer.ln_f." if config.is_gpt2 else "model.norm."
        self.norm = norm(config)
        self.lm_head = Linear(config.hidden, config.vocab, bias=False)
        self.cap = config.logit_cap
        self.loss = cross_entropy

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        """Shard the unit, and compute the loss from logits that are sharded by vocabulary."""
        self.loss = partial(divided_cross_entropy, group=group, vocab=self.lm_head.outputs)
        return super().divide(group, made)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map hidden states [rows, length, hidden] to the loss; without targets, to logits [rows, length, vocab]."""
        (logits,) = op(
            "projections", partial(self.group.column_parallel, layers=[self.lm_head]), op("norm", self.norm, x)
        )
        if self.cap is not None:
            logits = op("cap", partial(capped, cap=self.cap), logits)
        return self.loss_of(logits, micro_batch, op)

    def linear_layers(self) -> list[Linear]:
        """No layer: the logits are computed in the run's dtype."""
        return []

    def hf_name(self, name: str) -> str:
        """A parameter's Hugging Face name; the final norm has a prefix, `lm_head` has none."""
        return self.norm_name + name.removeprefix("norm.") if name.startswith("norm.") else name
