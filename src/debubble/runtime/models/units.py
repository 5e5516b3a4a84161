"""Base class of a transformer's units, and the head; the others are in llama.py, experts.py and gpt2.py.

Every unit calls its operators by name through `op` (see memory/recomputation.py): `norm`, `projections`, `core`,
`activation`, `multiply` are those that a plan can choose to recompute; `full` means all.  Parameters have Hugging
Face's names after the unit's `prefix`.
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
    """A unit's arguments after its input: the targets [rows, length], the factor of the loss, a seed."""

    targets: Tensor | None = None
    scale: float = 1.0
    seed: int = 0
    routing: Routing | None = None
    """Notes of the routers, if they have an auxiliary loss."""
    positions: Tensor | None = None
    """Position of each token, [rows or 1, length]; None: 0, 1, 2 and so on in every row."""
    documents: Tensor | None = None
    """Number of each token's document, within which attention stays; None: a row is one.

    [rows, length], of the whole sequence, also where ranks divide it.
    """
    loss_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The rows of the entries that the loss asks for, by name."""
    slice: SequenceSlice | None = None
    """The slice of its sequences that it is; None: they are whole."""

    @property
    def first_position(self) -> int:
        """The position of its first token, where there are no `positions`."""
        return 0 if self.slice is None else self.slice.start


def check_whole_recomputation(planned: Iterable[PlannedUnit], modules: str) -> None:
    """Raise InputError if a unit recomputes some of its operators, which `modules`, called whole, do not have."""
    odd = next((name for unit in planned for name in unit.strategies if name not in ("none", "full")), None)
    if odd is not None:
        raise InputError(f"{modules} recompute in full or not at all, not '{odd}'.")


class UnitModule(nn.Module):
    """One unit; `forward(x, micro_batch, op)` maps the unit's input to its output."""

    prefix = ""
    """Prefix of Hugging Face's names of the unit's parameters."""
    salt = 0
    """Tells the units' random numbers apart."""
    half_of: int | None = None
    """The layer that it is a half of; both halves may recompute together."""
    columns: tuple[str, ...] = ()
    """The layers that tensor parallelism divides by columns (tables: by rows, which stand for tokens)."""
    rows: tuple[str, ...] = ()
    """The layers that it divides by rows."""
    fused: Mapping[str, int] = MappingProxyType({})
    """Number of layers in one, for those of the former that are several."""
    constants: frozenset[str] = frozenset()
    """Hugging Face's names of frozen parameters that keep their dtype, whatever that of the run."""
    group = NO_TENSOR_GROUP
    """The ranks that divide the unit among them."""
    context = NO_CONTEXT_GROUP
    """The ranks that divide sequences among them."""
    expert_group = NO_EXPERT_GROUP
    """The ranks that divide the experts among them, if the unit has some."""
    ledger: Ledger | None = None
    """The ledger of the device's activations."""
    loss: Loss | None = None
    """Loss that the output of the last unit goes into, if there are targets."""

    def cuts(self) -> Mapping[str, Cut]:
        """Cuts of the parameters that tensor parallelism divides, by name; the others are the same on all ranks."""
        found: dict[str, Cut] = {}
        for path in self.columns:
            cuts = column_cuts(self.get_submodule(path), self.fused.get(path, 1))
            found |= {f"{path}.{name}": cut for name, cut in cuts.items()}
        for path in self.rows:
            found |= {f"{path}.{name}": cut for name, cut in row_cuts(self.get_submodule(path)).items()}
        return found

    def expert_cuts(self) -> Mapping[str, Cut]:
        """Cuts of the parameters that expert parallelism divides, by name."""
        return {}

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        """Keep this rank's shards alone; how each parameter is divided, by Hugging Face name.

        `made` has the shards of parameters that other units share.
        """
        self.group = group
        return self._keep_own(group, self.cuts(), made)

    def divide_experts(self, group: ExpertGroup) -> Mapping[str, Cut]:
        """Keep this rank's experts alone; how each parameter of experts is divided, by Hugging Face name."""
        self.expert_group = group
        return self._keep_own(group, self.expert_cuts(), {})

    def _keep_own(
        self, group: CutGroup, cuts: Mapping[str, Cut], made: dict[nn.Parameter, nn.Parameter]
    ) -> Mapping[str, Cut]:
        for name, cut in cuts.items():
            path, _, last = name.rpartition(".")
            parameter = self.get_parameter(name)
            if parameter not in made:
                own = group.own(parameter.detach(), cut).clone()
                made[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
            setattr(self.get_submodule(path), last, made[parameter])
        return {self.hf_name(name): cut for name, cut in cuts.items()}

    def hf_name(self, name: str) -> str:
        """A parameter's Hugging Face name."""
        return self.prefix + name

    def loss_of(self, y: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """The loss of the unit's output; the output itself where there is none."""
        if self.loss is None or micro_batch.targets is None:
            return y
        loss = partial(self.loss, **micro_batch.loss_inputs) if micro_batch.loss_inputs else self.loss
        of_targets = partial(scaled_loss, loss=loss, targets=micro_batch.targets, scale=micro_batch.scale)
        scaled: Tensor = op("loss", of_targets, y)
        return scaled

    def drop(self, x: Tensor, p: float, micro_batch: MicroBatch, op: Operators, place: int) -> Tensor:
        """Dropout in training; its mask depends on the step, the unit, the micro-batch and the place in the unit."""
        if not p or not self.training:
            return x
        dropped: Tensor = op("dropout", partial(drop, p=p, seed=self.seed(micro_batch, place)), x)
        return dropped

    def attach_ledger(self, ledger: Ledger) -> None:
        """Tell the ledger of the unit's device what of it is no activation."""
        self.ledger = ledger
        ledger.exclude((*self.parameters(), *self.buffers()))

    def slice_of(self, micro_batch: MicroBatch) -> LayerSlice | None:
        """The slice of a sequence that it is, in this unit; None: it is whole."""
        return None if micro_batch.slice is None else micro_batch.slice.in_layer(self.salt, self.ledger)

    def linear_layers(self) -> list[Linear]:
        """The layers that may multiply in 8 bits; adapters are none of them."""
        paths = (*self.columns, *self.rows)
        return [layer for path in paths if isinstance(layer := self.get_submodule(path), Linear)]

    def compile_functions(self, compiled: Compiler) -> None:
        """Compile what holds no linear layer."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.function = compiled(rms_norm)
        if self.loss is cross_entropy:
            self.loss = compiled(cross_entropy)

    def seed(self, micro_batch: MicroBatch, place: int) -> int:
        """The seed of the random numbers at one place of this unit in one micro-batch, 32 bits."""
        return zlib.crc32(f"{micro_batch.seed} {self.salt} {place}".encode())

    def hf_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by their Hugging Face names."""
        return {self.hf_name(name): p for name, p in self.named_parameters()}


def norm(config: ModelConfig) -> nn.Module:
    """The family's norm over the hidden size."""
    if config.is_gpt2:
        return nn.LayerNorm(config.hidden, eps=config.norm_eps)
    return RMSNorm(config.hidden, config.norm_eps, offset=config.norm_offset)


def residual(x: Tensor, summand: Tensor, op: Operators) -> Tensor:
    """The residual stream after a half-layer that adds this to it."""
    y: Tensor = op("residual", torch.add, summand, x)
    return y


class Head(UnitModule):
    """Final norm, logits, and the loss if there are targets (else the logits are the output)."""

    columns = ("lm_head",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_name = "transformer.ln_f." if config.is_gpt2 else "model.norm."
        self.norm = norm(config)
        self.lm_head = Linear(config.hidden, config.vocab, bias=False)
        self.cap = config.logit_cap
        self.loss = cross_entropy

    def divide(self, group: TensorGroup, made: dict[nn.Parameter, nn.Parameter]) -> Mapping[str, Cut]:
        """Divide the unit as others are, and compute the loss from logits that are divided among the ranks."""
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
        """None: the logits are computed in the run's dtype."""
        return []

    def hf_name(self, name: str) -> str:
        """A parameter's Hugging Face name; the final norm has another prefix than `lm_head`."""
        return self.norm_name + name.removeprefix("norm.") if name.startswith("norm.") else name
