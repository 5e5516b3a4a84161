"""Offload by module, the same modules in every layer: Megatron-LM's fine-grained activation offloading.

The inputs that a layer's modules keep for the backward go to the host after the forward, and come back for the
backward (docs/user-guide/features/fine_grained_activation_offloading.md there).  Layer by layer they move next to the
computing of the next one; here a stage's move together, next to the operation that follows its forward or precedes its
backward, which takes no less memory.  Where a backward follows its own forward, Megatron-LM keeps the last layer; here
such a stage keeps all of them, as it has no other micro-batch to make room for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from debubble.costs.partition import Partition
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.ir import Kind, Number, Op, RunOptions, Schedule
from debubble.ir.schedule import Shares, all_shares, share_of
from debubble.models import Model
from debubble.models.mixers import Attention
from debubble.targets.orders import without_transfers

INPUT = "input"
"""The input of a layer, which its first product keeps; the first layer of a stage has it from the pipeline."""
MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""In the order of computation."""
_OF_EXPERTS = frozenset({"expert_fc1", "moe_act"})


@dataclass(frozen=True)
class ModuleOffload:
    """Modules whose inputs leave, and the share of them, counted from the beginning of each stage, that does."""

    modules: tuple[str, ...]
    share: float = 1.0

    def combines_with(self, recomputed: Collection[str]) -> bool:
        """Tell whether Megatron-LM offloads these modules where it recomputes these operators."""
        return not (
            "full" in recomputed
            or ("core" in recomputed and {"core_attn", "attn_proj"} & {*self.modules})
            or ("mlp" in recomputed and _OF_EXPERTS & {*self.modules})
        )

    def moved_bytes(self, units: Units, partition: Partition) -> list[float]:
        """Bytes that every stage moves of each micro-batch."""
        return [float(sum(self._groups(units, stage))) for stage in partition]

    def _groups(self, units: Units, stage: Sequence[tuple[int, str]]) -> list[Number]:
        """Bytes of every module's input that leaves, in the order of computation."""
        groups: list[Number] = []
        layers = [unit.module_bytes for index, _ in stage if (unit := units.units[index]).module_bytes]
        for place, layer in enumerate(layers):
            inputs = {**layer, "qkv_linear": layer.get("qkv_linear", 0) + (layer.get(INPUT, 0) if place else 0)}
            groups += [inputs[name] for name in MODULES if name in self.modules and inputs.get(name)]
        return groups[: len(groups) - int(len(groups) * (1 - self.share))]

    def schedule(self, plain: Schedule, units: Units, partition: Partition) -> Schedule:
        """The schedule with what leaves and comes back; `plain` moves nothing."""
        saved_bytes = [
            float(sums.activation_recomputed if s in plain.fused_recompute else sums.activation)
            for s, sums in enumerate(units.stage_sums(tuple(stage)) for stage in partition)
        ]
        shares = {s: size / saved_bytes[s] for s, size in enumerate(self.moved_bytes(units, partition)) if size}
        orders = tuple(tuple(_with_transfers(order, shares)) for order in plain.orders)
        moving = {op.stage for order in orders for op in order if op.kind is Kind.O}
        return replace(plain, orders=orders, offload_fraction={s: shares[s] for s in sorted(moving)})


def _with_transfers(order: Sequence[Op], stages: Collection[int]) -> Iterator[Op]:
    """The order with O after each forward of these stages, and L before its backward, where others are between."""
    at_once = {
        (op.stage, op.micro_batch)
        for op, following in pairwise(order)
        if op.kind is Kind.F and (op.stage, op.micro_batch) == (following.stage, following.micro_batch)
    }
    for op in order:
        moves = op.stage in stages and (op.stage, op.micro_batch) not in at_once
        if moves and op.kind in (Kind.B, Kind.I):
            yield Op(Kind.L, op.stage, op.micro_batch)
        yield op
        if moves and op.kind is Kind.F:
            yield Op(Kind.O, op.stage, op.micro_batch)


def setting_of(
    schedule: Schedule, units: Units, partition: Partition, settings: Sequence[ModuleOffload]
) -> ModuleOffload | None:
    """The first of the settings that makes a schedule's transfers; None if none does.

    Args:
        schedule: The schedule.
        units: Units that know the bytes of their modules.
        partition: Their partition.
        settings: Those that a framework has.
    """
    plain = without_transfers(schedule)
    if schedule.explicit_recompute or schedule.peers:
        return None
    for setting in settings:
        if not setting.combines_with(recomputed_operators(units, partition)):
            continue
        made = setting.schedule(plain, units, partition)
        if made.orders == schedule.orders and _same_fractions(made.offload_fraction, schedule.offload_fraction):
            return setting
    return None


def _same_fractions(ours: Shares, theirs: Shares) -> bool:
    """Compare up to rounding; `ours` has one share for all micro-batches of a stage."""
    return ours.keys() == theirs.keys() and all(
        abs(float(share_of(ours, stage, 0)) - float(share)) < _ROUNDING
        for stage, shares in all_shares(theirs)
        for share in shares
    )


_ROUNDING = 1e-9
"""Largest difference of equal shares by rounding of floats."""


def recomputed_operators(units: Units, partition: Partition) -> frozenset[str]:
    """The operators that any unit recomputes, whether units are layers or halves of them."""
    names = {
        units.units[index].strategies[name].operators or name for stage in partition for index, name in stage
    }  # fmt: skip
    return frozenset(op for name in names for half in name.split("|") for op in half.split("+")) - {"none"}


def with_modules(unit: Unit, model: Model, options: RunOptions) -> Unit:
    """A half-layer that knows the bytes of its modules' inputs."""
    if unit.layer is None or unit.type not in ("attention", "mlp"):
        return unit
    if unit.type == "attention":
        described = model.per_layer[unit.layer].attention
        return replace(unit, module_bytes=_of_attention(unit, model)) if isinstance(described, Attention) else unit
    return replace(unit, module_bytes=_of_experts(unit, model, options)) if model.is_moe(unit.layer) else unit


def _saved(unit: Unit, operators: str) -> Number:
    """Bytes that a recomputation of these operators drops."""
    name = unit.strategy_named(operators)
    return 0 if name is None else unit.activation - unit.strategies[name].activation


def _of_attention(unit: Unit, model: Model) -> Mapping[str, Number]:
    """The norm's result is the product's input, and queries, keys and values the core's, which may have been normed."""
    width, kv_width = model.attention_width, model.kv_width
    saved_width = width + 2 * kv_width + (width + kv_width if model.qk_norm else 0)
    return {
        INPUT: unit.strategies["full"].activation,
        "qkv_linear": _saved(unit, "norm"),
        "core_attn": _saved(unit, "projections") * (width + 2 * kv_width) / saved_width,
        "attn_proj": _saved(unit, "core"),
    }


def _of_experts(unit: Unit, model: Model, options: RunOptions) -> Mapping[str, Number]:
    """The sorted tokens are the experts' input, and their first product's result that of the activation function."""
    experts = model.experts
    assert experts is not None
    boundary = unit.strategies["full"].activation
    inner = _saved(unit, "mlp") - _saved(unit, "multiply" if "multiply" in unit.strategies else "activation")
    routed = experts.per_token * experts.ffn
    dispatched = unit.activation - _saved(unit, "norm+mlp") - boundary
    shards = options.expert_shards
    return {
        "mlp_norm": boundary,
        "expert_fc1": dispatched * shards / (1 + shards),
        "moe_act": inner * routed / (routed + experts.shared),
    }
