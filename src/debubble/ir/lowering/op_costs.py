"""The cost of each operation: its time, its lead, and the bytes that it allocates at its start and frees at its end.

It is defined here alone: simulation, pricing and search read its tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from debubble.ir.arrays import Bools, Ints, Numbers
from debubble.ir.ops import CODE, KINDS, RESHARDS, UNSHARDS, Kind, Op
from debubble.ir.schedule import Schedule, Shares, all_shares
from debubble.ir.stage_costs import Number, PerStage, StageCosts


class Tables(NamedTuple):
    """Costs by [R in list, kind, stage, micro-batch].

    The last axis has one entry if all micro-batches are equal, or one for each slice of a sequence if all sequences
    are.
    `R in list` is 1 for the operations of a stage and micro-batch that an R recomputes, and 2 where that is deeper.
    """

    time: Numbers
    allocated: Numbers
    """Bytes at the start of an operation."""
    freed: Numbers
    """Bytes at its end."""
    lead: Numbers
    """Time before the end of its F at which an O may start, and before that of its L a B, I or R; 0 for all others."""

    def at(self, level: Ints, kind: Ints, stage: Ints, micro_batch: Ints) -> Ints:
        """Return the places of operations in the raveled tables."""
        return places(self.time, level, kind, stage, micro_batch)


def places(table: Numbers, level: Ints, kind: Ints, stage: Ints, micro_batch: Ints) -> Ints:
    """Return the places of operations in a raveled table of costs."""
    _, kinds, stages, scales = table.shape
    column = micro_batch % scales
    where: Ints = ((level * kinds + kind) * stages + stage) * scales + column
    return where


@dataclass(frozen=True, kw_only=True)
class OpCosts:
    """Prices operations under costs and under what a schedule fixes for its stages.

    Attributes:
        costs: Times and sizes of the stages.
        fused_recompute: As of a Schedule, and so the other attributes.

    Example:
        >>> OpCosts(costs=StageCosts.of(stages=2, forward=3)).time(Op(Kind.F, 0, 0))
        3
    """

    costs: StageCosts
    fused_recompute: frozenset[int] = frozenset()
    recompute_fraction: Shares = field(default_factory=dict)
    offload_fraction: Shares = field(default_factory=dict)
    deeper: frozenset[tuple[int, int]] = frozenset()
    host_steps: frozenset[int] = frozenset()

    @staticmethod
    def of(schedule: Schedule, costs: StageCosts) -> OpCosts:
        """The costs of a schedule's operations."""
        return OpCosts(
            costs=costs,
            fused_recompute=schedule.fused_recompute,
            recompute_fraction=schedule.recompute_fraction,
            offload_fraction=schedule.offload_fraction,
            deeper=schedule.deeper,
            host_steps=schedule.host_steps,
        )

    def time(self, op: Op, *, explicit: bool = False) -> Number:
        """Time of an operation; `explicit` if an R recomputes its stage and micro-batch."""
        return self._entry(self._exact.time, op, explicit)

    def allocates(self, op: Op, *, explicit: bool = False) -> Number:
        """Bytes that it allocates at its start on its own device."""
        return self._entry(self._exact.allocated, op, explicit)

    def frees(self, op: Op, *, explicit: bool = False) -> Number:
        """Bytes that it frees at its end on its own device."""
        return self._entry(self._exact.freed, op, explicit)

    def lead(self, op: Op, *, explicit: bool = False) -> Number:
        """The time before the end of its forward at which an O may start, or of its reload a B, I or R."""
        return self._entry(self._exact.lead, op, explicit)

    def tables(self, *, dtype: Any = object, explicit: bool = True) -> Tables:
        """All costs; exact with dtype object.  Without `explicit` they hold no entries for what an R recomputes."""
        each = [_TableBuilder(self, dtype, level=level).tables() for level in self._levels(explicit)]
        return Tables(*(np.stack(tables) for tables in zip(*each, strict=True)))

    def sizes(self, *, dtype: Any = object, explicit: bool = True) -> tuple[Numbers, Numbers]:
        """The tables of the bytes that operations allocate and free, without those of times."""
        builders = [_TableBuilder(self, dtype, level=level) for level in self._levels(explicit)]
        allocated, freed = (np.stack(tables) for tables in zip(*(each.sizes() for each in builders), strict=True))
        return allocated, freed

    def _levels(self, explicit: bool) -> range:
        return range((1 if self.costs.recompute_deeper is None else 2) + 1 if explicit else 1)

    @cached_property
    def _exact(self) -> Tables:
        return self.tables()

    def _entry(self, table: Numbers, op: Op, explicit: bool) -> Number:
        column = op.micro_batch % table.shape[-1]
        level = int(explicit) * (2 if op[1:] in self.deeper else 1)
        number: Number = table[level, CODE[op.kind], op.stage, column]
        return number


def streaming_lead(compute: Numbers, transfer: Numbers, share: Numbers, overlap: Numbers) -> Numbers:
    """The time before the end of a forward at which its offload may start, with the first units' activations.

    Before a unit come the shares e of the forward, the unit's own included, and c of the activation.  No unit's bytes
    leave before it has computed if the lead is at most (1 - e) x compute + c x transfer for every unit that moves.  An
    overlap q says that 1 - e is at least q - c everywhere; then the least of these is at c = 0 or at the last unit that
    moves.  A backward reads what a reload brings in the opposite order, last units first: it leads the same way.

    Args:
        compute: Time of the forward, or of the backward.
        transfer: Time of a transfer of everything that the forward leaves.
        share: The part of it that moves.
        overlap: The stage's, from 0 to 1.
    """
    moved = np.minimum(share, overlap)
    result: Numbers = np.minimum(overlap * compute, (overlap - moved) * compute + moved * transfer)
    return result


def recompute_lead(compute: Numbers, transfer: Numbers, share: Numbers, overlap: Numbers) -> Numbers:
    """The time before the end of its reload at which an R may start, as reloads bring the first units first.

    A part of the units moves, the first, so that the recomputation of the others is of no use: with the shares e of the
    recomputation before a unit and c of the activation after it, an overlap q says that e is at least q - c.

    Args:
        compute: Time of the recomputation.
        transfer: Time of a transfer of everything that the forward leaves.
        share: The part of it that moves.
        overlap: The stage's, from 0 to 1.
    """
    result: Numbers = np.maximum(overlap + share - 1, 0) * np.minimum(compute, transfer)
    return result


class _TableBuilder:
    """Builds the tables by [kind, stage, micro-batch], for what an R recomputes (1, or 2: deeper) or for all else (0).

    Its arrays have a row per stage, and a column per micro-batch, or one where all are alike.
    """

    def __init__(self, op_costs: OpCosts, dtype: Any, *, level: int) -> None:
        self.op_costs, self.costs, self.dtype, self.explicit = op_costs, op_costs.costs, dtype, level > 0
        self.scale = np.array([self.costs.micro_batch_scale or (1,)], dtype=dtype)
        self.slices = self.costs.slices
        pattern = self.costs.attention_scale
        if pattern is not None:
            shares = (*all_shares(op_costs.recompute_fraction), *all_shares(op_costs.offload_fraction))
            count = max(len(pattern), self.scale.shape[1], *(len(each) for _, each in shares))
            self.longer = (np.array([pattern * (count // len(pattern))], dtype=dtype) - 1) * self.scale
            """Time that attention takes more than where tokens attend to the fewest keys, over what it takes there."""
        self.recomputed_fraction = self._fractions(op_costs.recompute_fraction)
        self.fused = self._mask(() if self.explicit else op_costs.fused_recompute)
        self.whole = self._column(self.costs.activation)
        again, left = self.costs.recompute, self.costs.activation_recomputed
        if level == 2:
            assert self.costs.recompute_deeper is not None
            assert self.costs.activation_deeper is not None
            again, left = self.costs.recompute_deeper, self.costs.activation_deeper
        self.recompute = self._column(again) * self.recomputed_fraction
        dropped = (self.whole - self._column(left)) * self.recomputed_fraction
        self.remaining = np.where(self.fused | self.explicit, self.whole - dropped, self.whole)
        """Bytes that F leaves."""
        self.movable = self.remaining
        """Bytes of them that may be offloaded."""
        if self.slices > 1:
            self.movable = self.remaining - self._column(self.costs.keys_and_values)

    def tables(self) -> Tables:
        """Times, bytes allocated and freed, and leads of all operations."""
        times = self._times()
        time, lead = self._table(times), self._table(self._leads(times))
        return Tables(time, *self.sizes(), np.broadcast_to(lead, time.shape))

    def sizes(self) -> tuple[Numbers, Numbers]:
        """Bytes that all operations allocate and free."""
        allocated, freed = self._sizes()
        return self._table(allocated), self._table(freed)

    def _leads(self, times: Mapping[Kind, Numbers]) -> dict[Kind, Numbers]:
        """Leads of the kinds that stream."""
        costs, scale, share = self.costs, self.scale, self._fractions(self.op_costs.offload_fraction)
        overlaps = costs.offload_overlap, costs.reload_overlap, costs.recompute_overlap
        if costs.offload is None or costs.reload is None or not any(map(any, overlaps)):
            return {}
        one = np.ones((1, 1), dtype=self.dtype)
        whole = self._share_of_whole(one) * scale
        offload, reload = (self._column(times) * whole for times in (costs.offload, costs.reload))
        # Units that recompute keep less than the others: which share of the activation is whose is not known then.
        mixed = (self.fused | self.explicit) & (self.recomputed_fraction != 0) & (self.recomputed_fraction != 1)
        out, back, again = (np.where(mixed, 0, self._column(overlap)) for overlap in overlaps)
        leads = {Kind.O: streaming_lead(times[Kind.F], offload, share, out)}
        for kind in (Kind.B, Kind.I):
            # A backward begins no earlier than its reload.
            leads[kind] = np.minimum(streaming_lead(times[kind], reload, share, back), times[Kind.L])
        leads[Kind.R] = recompute_lead(times[Kind.R], reload, share, again)
        return leads

    def _sizes(self) -> tuple[dict[Kind, Numbers], dict[Kind, Numbers]]:
        """Bytes that the kinds allocate and free."""
        costs, scale = self.costs, self.scale
        kept, whole = self.remaining * scale, self.whole * scale
        moved = self.movable * self._fractions(self.op_costs.offload_fraction) * scale
        after = self._column(costs.activation_after_input) * scale
        before_backward = whole if self.explicit else kept
        restored = self._workspace_bytes(costs.recompute_workspace)
        restored_by_input = self._workspace_bytes(costs.recompute_workspace_input or costs.recompute_workspace)
        before_input = before_backward + restored_by_input
        gathered = self._column(costs.gathered)
        summed, taken = self._key_value_gradients()
        allocated = {
            Kind.F: kept,
            Kind.R: whole - kept,
            Kind.L: moved,
            Kind.B: restored + summed,
            Kind.I: restored_by_input + np.maximum(after - before_input, 0) + summed,
            **dict.fromkeys(UNSHARDS, gathered),
        }
        freed = {
            Kind.O: moved,
            Kind.B: before_backward + restored + taken,
            Kind.I: np.maximum(before_input - after, 0) + taken,
            Kind.W: after,
            **dict.fromkeys(RESHARDS, gathered),
        }
        return allocated, freed

    def _key_value_gradients(self) -> tuple[Number | Numbers, Number | Numbers]:
        """Bytes that backwards allocate and free for gradients of keys and values: the last slice's has the others'."""
        if self.slices == 1:
            return 0, 0
        last = np.arange(self.longer.shape[1]) % self.slices == self.slices - 1
        own = self._column(self.costs.key_value_gradient) * np.broadcast_to(self.scale, self.longer.shape)
        of_sequence = own.reshape(len(own), -1, self.slices).sum(axis=2).repeat(self.slices, axis=1)
        return np.where(last, of_sequence - own, 0), np.where(last, 0, own)

    def _workspace_bytes(self, workspace: PerStage | None) -> Numbers:
        """Bytes that a fused recomputation brings back at a time."""
        dropped = self.whole - self.remaining
        most = dropped if workspace is None else np.minimum(self._column(workspace), dropped)
        result: Numbers = np.where(self.fused, most, 0) * self.scale
        return result

    def _times(self) -> dict[Kind, Numbers]:
        """Times of the kinds."""
        costs, scale, column = self.costs, self.scale, self._column
        recompute = self._with_attention(self.recompute * scale, costs.attention_recompute, self.recomputed_fraction)
        backward_input, backward_weight = column(costs.backward_input), column(costs.backward_weight)
        communication = column(costs.communication)
        by_input = self._with_attention(backward_input * scale, costs.attention_backward)
        backward = by_input + backward_weight * scale
        host_steps = self._mask(self.op_costs.host_steps)
        time = {
            Kind.F: self._with_attention(column(costs.forward) * scale, costs.attention_forward),
            Kind.B: np.where(self.fused, backward + recompute, backward),
            Kind.I: np.where(self.fused, by_input + recompute, by_input),
            Kind.W: backward_weight * scale,
            Kind.R: recompute,
            Kind.SEND_F: communication * scale,
            Kind.SEND_B: communication[np.arange(costs.stages) - 1] * scale,
            Kind.S: np.where(host_steps, column(costs.host_step), column(costs.optimizer_step)),
            Kind.G: column(costs.gradient_reduce),
            Kind.D: column(costs.gradient_offload),
            Kind.P: column(costs.parameter_load),
            **dict.fromkeys(UNSHARDS, column(costs.parameter_gather)),
        }
        if costs.offload is not None and costs.reload is not None:
            share = self._moved_share()
            time |= {Kind.O: column(costs.offload) * share * scale, Kind.L: column(costs.reload) * share * scale}
        return time

    def _with_attention(self, time: Numbers, attention: PerStage, share: Number | Numbers = 1) -> Numbers:
        """The times of slices or micro-batches, whose part `attention` grows with the keys that a token attends to."""
        if self.costs.attention_scale is None:
            return time
        result: Numbers = time + self._column(attention) * share * self.longer
        return result

    def _moved_share(self) -> Numbers:
        """Share of a whole activation's offload time that its offload takes."""
        return self._share_of_whole(self._fractions(self.op_costs.offload_fraction))

    def _share_of_whole(self, share: Numbers) -> Numbers:
        """The share of a whole activation that a share of what F leaves is."""
        partly = (self.movable != self.whole) & (self.whole != 0)
        result: Numbers = np.where(partly, share * self.movable / np.where(partly, self.whole, 1), share)
        return result

    def _column(self, values: Iterable[Number]) -> Numbers:
        return np.array(tuple(values), dtype=self.dtype)[:, None]

    def _fractions(self, given: Shares) -> Numbers:
        columns = max((len(each) for _, each in all_shares(given)), default=1)
        result: Numbers = np.full((self.costs.stages, columns), 1, dtype=self.dtype)
        for stage, each in all_shares(given):
            result[stage] = each
        return result

    def _mask(self, chosen: Iterable[int]) -> Bools:
        mask = np.zeros((self.costs.stages, 1), dtype=np.bool_)
        mask[list(chosen)] = True
        return mask

    def _table(self, rows: Mapping[Kind, Numbers]) -> Numbers:
        columns = max((row.shape[1] if row.ndim > 1 else 1 for row in rows.values()), default=1)
        result: Numbers = np.zeros((len(KINDS), self.costs.stages, columns), dtype=self.dtype)
        for kind, row in rows.items():
            result[CODE[kind]] = row
        return result
