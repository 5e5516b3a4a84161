"""A Schedule: the order of every device's operations.

One list per device has compute operations and transfers together, in the order in which they start.  Each lane takes
its operations from the list in that order; lanes overlap.  A reload (L) starts no earlier than the compute operation
before it in the list; otherwise a transfer starts as soon as it can.

Recomputation has two forms.  *Explicit*: an R in the list, anywhere before the backward.  *Fused*: no R, but the
stage is in `fused_recompute`; its backward first recomputes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from debubble.argument_types import with_checked_types
from debubble.ir.arrays import Bools, Ints
from debubble.ir.ops import CODE, COMPUTE, HOST_STEP, KINDS, Kind, Op
from debubble.ir.placement import Placement
from debubble.ir.stage_costs import Number, StageCosts
from debubble.pickling import PickledFields

Shares = Mapping[int, Number | tuple[Number, ...]]
"""Stage -> fraction that is recomputed or offloaded: one for all micro-batches, or one per micro-batch."""


def share_of(shares: Shares, stage: int, micro_batch: int) -> Number:
    """The fraction of a stage for a micro-batch; 1 if the stage has none."""
    share = shares.get(stage, 1)
    return share[micro_batch] if isinstance(share, tuple) else share


def all_shares(shares: Shares) -> Iterator[tuple[int, tuple[Number, ...]]]:
    """Every stage in `shares` with its fractions."""
    for stage, share in shares.items():
        yield stage, share if isinstance(share, tuple) else (share,)


_GRADIENTS = (Kind.B, Kind.W, Kind.G)
"""A stage's gradients are complete after its last operation of these kinds."""


class OpArrays(NamedTuple):
    """Operations as arrays with an entry per operation; kinds are indices in KINDS."""

    kind: Ints
    stage: Ints
    micro_batch: Ints
    device: Ints

    @staticmethod
    def from_orders(orders: Sequence[Sequence[Op]]) -> OpArrays:
        """The operations of all lists, one list after the other."""
        ops = tuple(itertools.chain.from_iterable(orders))
        kinds, stages, micro_batches = zip(*ops, strict=True) if ops else ((), (), ())
        return OpArrays(
            kind=np.array([CODE[kind] for kind in kinds], dtype=np.int64),
            stage=np.array(stages, dtype=np.int64),
            micro_batch=np.array(micro_batches, dtype=np.int64),
            device=np.repeat(np.arange(len(orders)), np.array([len(order) for order in orders], dtype=np.int64)),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule(PickledFields):
    """An order of one training step.

    Attributes:
        name: The name of the schedule, such as `1f1b`.
        placement: The device of every stage.
        micro_batches: The number of micro-batches; with slices, the number of all slices.
        orders: Per device, its operations in the order in which they start.
        slices: Slices per sequence (Seq1F1B): micro-batch j is slice j % slices of sequence j // slices.  The slices of
            a sequence run forwards in their order, and backwards in reverse.
        fused_recompute: Stages whose backward recomputes first.
        recompute_fraction: Stage -> fraction of its recomputation that takes place (absent: 1), or a tuple with one
            per micro-batch.
        offload_fraction: Stage -> fraction of the activation that O moves (absent: 1), or a tuple with one per
            micro-batch.
        deeper: Stages and micro-batches whose R recomputes by the stage's second, deeper level.
        peers: Device -> the device to which it offloads (absent: the host).
        asynchronous: Boundaries, named by the stage before them, whose messages overlap with computing even if the
            communication model is `blocking`.
        link_orders: Per shared host link, its transfers in the order in which it serves them; transfers in no list are
            served by arrival.

    Example:
        >>> Schedule.of("gpipe", Placement.linear(1), 1, [["0F0", "0B0"]]).orders[0][1].name
        '0B0'
    """

    name: str
    placement: Placement
    micro_batches: int
    orders: tuple[tuple[Op, ...], ...]
    slices: int = 1
    fused_recompute: frozenset[int] = frozenset()
    recompute_fraction: Shares = field(default_factory=dict, hash=False)
    offload_fraction: Shares = field(default_factory=dict, hash=False)
    deeper: frozenset[tuple[int, int]] = frozenset()
    peers: Mapping[int, int] = field(default_factory=dict, hash=False)
    asynchronous: frozenset[int] = frozenset()
    link_orders: tuple[tuple[Op, ...], ...] = ()

    def __repr__(self) -> str:
        shape = f"{self.devices} devices, {self.stages} stages, {self.micro_batches} micro-batches"
        return f"Schedule({self.name}: {shape}, {sum(map(len, self.orders))} operations)"

    def _repr_html_(self) -> str:
        import debubble

        return debubble.inline_html(self)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.placement.devices

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    @cached_property
    def arrays(self) -> OpArrays:
        """The operations of all lists, device by device."""
        return OpArrays.from_orders(self.orders)

    @cached_property
    def positions(self) -> Ints:
        """The index of each operation in `arrays`, by kind, stage and micro-batch; -1 if there is none."""
        kind, stage, micro_batch, _ = self.arrays
        result = np.full((len(KINDS), self.stages, self.micro_batches), -1)
        result[kind, stage, micro_batch] = np.arange(len(kind))
        return result

    @cached_property
    def operations(self) -> frozenset[Op]:
        """The operations of all devices."""
        return frozenset(op for order in self.orders for op in order)

    @cached_property
    def split_backward(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose backward is split into I and W."""
        return self._pairs(Kind.I)

    @cached_property
    def explicit_recompute(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs that recompute by an R in the list."""
        return self._pairs(Kind.R)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs whose activation is offloaded."""
        return self._pairs(Kind.O)

    @cached_property
    def host_steps(self) -> frozenset[int]:
        """The stages whose optimizer step runs on the host: those whose gradients are offloaded."""
        return frozenset(stage for stage, _ in self._pairs(Kind.D))

    def _pairs(self, kind: Kind) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) pairs with an operation of a kind."""
        chosen = self.arrays.kind == CODE[kind]
        return frozenset(zip(self.arrays.stage[chosen].tolist(), self.arrays.micro_batch[chosen].tolist(), strict=True))

    def label(self, micro_batch: int) -> str:
        """The micro-batch's number in pictures; with slices, sequence and slice: `0.3`."""
        if self.slices == 1:
            return str(micro_batch)
        return f"{micro_batch // self.slices}.{micro_batch % self.slices}"

    def computes(self, op: Op) -> bool:
        """Tell whether an operation runs on the compute lane."""
        return op.kind in COMPUTE or (op.kind is Kind.S and op.stage not in self.host_steps)

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Tell whether a stage recomputes for a micro-batch, fused or explicitly."""
        return stage in self.fused_recompute or (stage, micro_batch) in self.explicit_recompute

    def recomputes_deeper(self, stage: int, micro_batch: int) -> bool:
        """Tell whether a stage recomputes for a micro-batch at its deeper level."""
        return (stage, micro_batch) in self.deeper and (stage, micro_batch) in self.explicit_recompute

    def levels(self, explicit: Bools, stage: Ints, micro_batch: Ints) -> Ints:
        """The recomputation level of operations: 0 without an R, 1 with one (`explicit`), 2 with a deeper one."""
        deeper = np.zeros((self.stages, self.micro_batches), dtype=np.int64)
        for pair in self.deeper:
            deeper[pair] = 1
        result: Ints = explicit * (1 + deeper[stage, micro_batch])
        return result

    def recompute_time(self, costs: StageCosts, stage: int, micro_batch: int) -> Number:
        """Time of a stage's recomputation for a micro-batch."""
        times = costs.recompute
        if self.recomputes_deeper(stage, micro_batch):
            assert costs.recompute_deeper is not None
            times = costs.recompute_deeper
        share, scale = share_of(self.recompute_fraction, stage, micro_batch), costs.scale_of(micro_batch)
        time = times[stage] * scale
        if costs.attention_scale is not None:
            time += costs.attention_recompute[stage] * (costs.attention_scale_of(micro_batch) - scale)
        return time * share

    def kept_bytes(self, costs: StageCosts, stage: int, micro_batch: int) -> Number:
        """Bytes that F of this stage and micro-batch saves, before `micro_batch_scale`."""
        if not self.recomputes(stage, micro_batch):
            return costs.activation[stage]
        recomputed = costs.activation_recomputed
        if self.recomputes_deeper(stage, micro_batch):
            assert costs.activation_deeper is not None
            recomputed = costs.activation_deeper
        share = share_of(self.recompute_fraction, stage, micro_batch)
        return costs.activation[stage] - (costs.activation[stage] - recomputed[stage]) * share

    def moved_bytes(self, costs: StageCosts, stage: int, micro_batch: int) -> Number:
        """Bytes that O of this stage and micro-batch offloads, before `micro_batch_scale`."""
        movable = self.kept_bytes(costs, stage, micro_batch)
        if costs.attention_scale is not None:
            movable -= costs.keys_and_values[stage]
        return movable * share_of(self.offload_fraction, stage, micro_batch)

    def backward_of(self, stage: int, micro_batch: int) -> Op:
        """The operation that consumes the gradient: I if the backward is split, else B."""
        kind = Kind.I if (stage, micro_batch) in self.split_backward else Kind.B
        return Op(kind, stage, micro_batch)

    def in_flight(self, device: int, ends: Collection[Kind] = (Kind.B, Kind.W)) -> Iterator[tuple[int, ...]]:
        """After every operation of a device, the number of micro-batches per stage between F and one of `ends`."""
        counts = dict.fromkeys(self.placement.stages_of[device], 0)
        for op in self.orders[device]:
            if op.kind is Kind.F:
                counts[op.stage] += 1
            elif op.kind in ends:
                counts[op.stage] -= 1
            yield tuple(counts.values())

    def with_whole_sequences(self) -> Schedule:
        """A schedule of the forwards only, with full sequences in place of their first slices."""
        if self.slices == 1:
            return self
        orders = tuple(
            tuple(
                op._replace(micro_batch=op.micro_batch // self.slices)
                for op in order
                if op.kind is Kind.F and op.micro_batch % self.slices == 0
            )
            for order in self.orders
        )
        return Schedule(
            name=self.name, placement=self.placement, micro_batches=self.micro_batches // self.slices, orders=orders
        )

    def with_split_backwards(self) -> Schedule:
        """The schedule with I and W, one after the other, in place of every B."""
        halves = (Kind.I, Kind.W)
        return self.replacing(lambda op: [op._replace(kind=half) for half in halves] if op.kind is Kind.B else [op])

    def with_host_steps(self, stages: Collection[int]) -> Schedule:
        """The schedule with optimizer steps of these stages on the host.

        P come first, in order of use; D and S follow the last gradients.

        Args:
            stages: The stages, whose costs must include this (`Units.stage_costs(on_host=...)`).
        """
        if not stages:
            return self
        last = {op.stage: op for order in self.orders for op in order if op.stage in stages and op.kind in _GRADIENTS}
        steps = {op: [Op(kind, op.stage, self.micro_batches - 1) for kind in (Kind.D, Kind.S)] for op in last.values()}
        loads = [[Op(Kind.P, s, 0) for s in local if s in stages] for local in self.placement.stages_of]
        stepped = self.replacing(lambda op: [op, *steps.get(op, ())])
        return replace(self, orders=tuple((*load, *order) for load, order in zip(loads, stepped.orders, strict=True)))

    def without_host_steps(self) -> Schedule:
        """The schedule without optimizer steps on the host and their transfers."""
        hosted = self.host_steps
        return self.replacing(lambda op: () if op.stage in hosted and op.kind in HOST_STEP else (op,))

    def without_explicit_recompute(self, stages: Collection[int]) -> Schedule:
        """The schedule without the R of these stages."""
        return self.replacing(lambda op: () if op.stage in stages and op.kind is Kind.R else (op,))

    def replacing(self, replacements: Callable[[Op], Iterable[Op]]) -> Schedule:
        """The schedule with every operation replaced by zero or more operations."""
        chained = itertools.chain.from_iterable
        orders = tuple(tuple(chained(map(replacements, order))) for order in self.orders)
        links = tuple(tuple(op for op in link if op in replacements(op)) for link in self.link_orders)
        return replace(self, orders=orders, link_orders=links)

    @staticmethod
    @with_checked_types()
    def of(
        name: str,
        placement: Placement,
        micro_batches: int,
        orders: Sequence[Iterable[Op | str]],
    ) -> Schedule:
        """Build a schedule from operations or their names.

        Args:
            name: The schedule's name.
            placement: The device of every stage.
            micro_batches: The number of micro-batches.
            orders: Per device, its operations or their names, such as `"0F0"`.

        Returns:
            The schedule, which is checked when it is lowered.

        Raises:
            InputError: If a name is not an operation.
        """
        parsed = tuple(tuple(Op.parse(op) if isinstance(op, str) else op for op in order) for order in orders)
        return Schedule(name=name, placement=placement, micro_batches=micro_batches, orders=parsed)
