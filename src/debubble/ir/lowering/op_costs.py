"""The costs of every operation: its time, its lead, and the bytes that it allocates at its start and frees at its end.

This is the only definition: simulation, pricing and search read its tables.
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
    """Costs by [recomputation level, kind, stage, micro-batch].

    The last axis has one entry if all micro-batches are equal, or one per slice if all sequences are equal.
    The level is 1 for operations of a stage and micro-batch that an R recomputes, 2 if that is deeper, and else 0.
    """

    time: Numbers
    allocated: Numbers
    """Bytes at the start of an operation."""
    freed: Numbers
    """Bytes at its end."""
    lead: Numbers
    """How long before the end of its F an O may start, or of its L a B, I or R; 0 for all other kinds."""

    def indices(self, level: Ints, kind: Ints, stage: Ints, micro_batch: Ints) -> Ints:
        """The indices of operations in the raveled tables."""
        return table_indices(self.time, level, kind, stage, micro_batch)


def table_indices(table: Numbers, level: Ints, kind: Ints, stage: Ints, micro_batch: Ints) -> Ints:
    """The indices of operations in a raveled table of costs."""
    _, kinds, stages, scales = table.shape
    column = micro_batch % scales
    indices: Ints = ((level * kinds + kind) * stages + stage) * scales + column
    return indices


@dataclass(frozen=True, kw_only=True)
class OpCosts:
    """Prices operations, given the costs of stages and the schedule's choices per stage.

    Attributes:
        costs: Times and sizes of the stages.
        fused_recompute: This attribute and those below are the ones of Schedule.

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
    def from_schedule(schedule: Schedule, costs: StageCosts) -> OpCosts:
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
        """Bytes that it allocates at its start on its device."""
        return self._entry(self._exact.allocated, op, explicit)

    def frees(self, op: Op, *, explicit: bool = False) -> Number:
        """Bytes that it frees at its end on its device."""
        return self._entry(self._exact.freed, op, explicit)

    def lead(self, op: Op, *, explicit: bool = False) -> Number:
        """How long before the end of its forward an O may start, or before the end of its reload a B, I or R."""
        return self._entry(self._exact.lead, op, explicit)

    def tables(self, *, dtype: Any = object, explicit: bool = True) -> Tables:
        """All costs; exact with dtype object.  Without `explicit` they have only recomputation level 0."""
        levels = [_TableBuilder(self, dtype, level=level).tables() for level in self._levels(explicit)]
        return Tables(*(np.stack(tables) for tables in zip(*levels, strict=True)))

    def sizes(self, *, dtype: Any = object, explicit: bool = True) -> tuple[Numbers, Numbers]:
        """Only the tables of allocated and freed bytes."""
        levels = [_TableBuilder(self, dtype, level=level).sizes() for level in self._levels(explicit)]
        allocated, freed = (np.stack(tables) for tables in zip(*levels, strict=True))
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
    """How long before the end of a forward its offload may start, with the first units' activations.

    Let e be the fraction of the forward up to the end of a unit, and c the fraction of the activation before the unit.
    No unit's bytes leave before it has computed if the lead is at most (1 - e) x compute + c x transfer for every
    offloaded unit.  With an overlap q, 1 - e is at least q - c for every unit; so the minimum is at c = 0 or at the
    last offloaded unit.  A backward reads a reload in reverse, last units first, and has the same lead.

    Args:
        compute: Time of the forward, or of the backward.
        transfer: Time of a transfer of all bytes that the forward saves.
        share: The fraction of them that is transferred.
        overlap: The stage's overlap, from 0 to 1.
    """
    moved = np.minimum(share, overlap)
    result: Numbers = np.minimum(overlap * compute, (overlap - moved) * compute + moved * transfer)
    return result


def recompute_lead(compute: Numbers, transfer: Numbers, share: Numbers, overlap: Numbers) -> Numbers:
    """How long before the end of its reload an R may start, as both process the first units first.

    Only the first units are offloaded, so the recomputation of all others hides no reload.  Let e be the fraction of
    the recomputation before a unit, and c that of the activation after it: with an overlap q, e is at least q - c.

    Args:
        compute: Time of the recomputation.
        transfer: Time of a transfer of all bytes that the forward saves.
        share: The fraction of them that is transferred.
        overlap: The stage's overlap, from 0 to 1.
    """
    result: Numbers = np.maximum(overlap + share - 1, 0) * np.minimum(compute, transfer)
    return result


class _TableBuilder:
    """Builds the tables by [kind, stage, micro-batch] of one recomputation level (see `Tables`).

    Its arrays have a row per stage, and a column per micro-batch, or one if all micro-batches are equal.
    """

    def __init__(self, op_costs: OpCosts, dtype: Any, *, level: int) -> None:
        self.op_costs, self.costs, self.dtype, self.explicit = op_costs, op_costs.costs, dtype, level > 0
        self.scale = np.array([self.costs.micro_batch_scale or (1,)], dtype=dtype)
        self.slices = self.costs.slices
        pattern = self.costs.attention_scale
        if pattern is not None:
            shares = (*all_shares(op_costs.recompute_fraction), *all_shares(op_costs.offload_fraction))
            count = max(len(pattern), self.scale.shape[1], *(len(fractions) for _, fractions in shares))
            self.longer = (np.array([pattern * (count // len(pattern))], dtype=dtype) - 1) * self.scale
            """Additional attention time per micro-batch, as a multiple of that with the fewest keys."""
        self.recomputed_fraction = self._fractions(op_costs.recompute_fraction)
        self.fused = self._mask(() if self.explicit else op_costs.fused_recompute)
        self.activation = self._column(self.costs.activation)
        recompute, recomputed = self.costs.recompute, self.costs.activation_recomputed
        if level == 2:
            assert self.costs.recompute_deeper is not None
            assert self.costs.activation_deeper is not None
            recompute, recomputed = self.costs.recompute_deeper, self.costs.activation_deeper
        self.recompute = self._column(recompute) * self.recomputed_fraction
        dropped = (self.activation - self._column(recomputed)) * self.recomputed_fraction
        self.saved = np.where(self.fused | self.explicit, self.activation - dropped, self.activation)
        """Bytes that F saves."""
        self.movable = self.saved
        """Bytes of them that may be offloaded."""
        if self.slices > 1:
            self.movable = self.saved - self._column(self.costs.keys_and_values)

    def tables(self) -> Tables:
        """Times, allocated and freed bytes, and leads of all operations."""
        times = self._times()
        time, lead = self._table(times), self._table(self._leads(times))
        return Tables(time, *self.sizes(), np.broadcast_to(lead, time.shape))

    def sizes(self) -> tuple[Numbers, Numbers]:
        """Allocated and freed bytes of all operations."""
        allocated, freed = self._sizes()
        return self._table(allocated), self._table(freed)

    def _leads(self, times: Mapping[Kind, Numbers]) -> dict[Kind, Numbers]:
        """Leads of the kinds that stream, by kind."""
        costs, scale, share = self.costs, self.scale, self._fractions(self.op_costs.offload_fraction)
        overlaps = costs.offload_overlap, costs.reload_overlap, costs.recompute_overlap
        if costs.offload is None or costs.reload is None or not any(map(any, overlaps)):
            return {}
        one = np.ones((1, 1), dtype=self.dtype)
        movable = self._activation_share(one) * scale
        offload, reload = (self._column(times) * movable for times in (costs.offload, costs.reload))
        # If only some units recompute, the distribution of saved bytes over units is unknown, and nothing streams.
        mixed = (self.fused | self.explicit) & (self.recomputed_fraction != 0) & (self.recomputed_fraction != 1)
        on_offload, on_reload, on_recompute = (np.where(mixed, 0, self._column(overlap)) for overlap in overlaps)
        leads = {Kind.O: streaming_lead(times[Kind.F], offload, share, on_offload)}
        for kind in (Kind.B, Kind.I):
            # A backward begins no earlier than its reload.
            leads[kind] = np.minimum(streaming_lead(times[kind], reload, share, on_reload), times[Kind.L])
        leads[Kind.R] = recompute_lead(times[Kind.R], reload, share, on_recompute)
        return leads

    def _sizes(self) -> tuple[dict[Kind, Numbers], dict[Kind, Numbers]]:
        """Allocated and freed bytes by kind."""
        costs, scale = self.costs, self.scale
        saved, activation = self.saved * scale, self.activation * scale
        moved = self.movable * self._fractions(self.op_costs.offload_fraction) * scale
        after = self._column(costs.activation_after_input) * scale
        before_backward = activation if self.explicit else saved
        restored = self._workspace_bytes(costs.recompute_workspace)
        restored_by_input = self._workspace_bytes(costs.recompute_workspace_input or costs.recompute_workspace)
        before_input = before_backward + restored_by_input
        gathered = self._column(costs.gathered)
        summed, taken = self._key_value_gradients()
        allocated = {
            Kind.F: saved,
            Kind.R: activation - saved,
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
        """Bytes that backwards allocate and free for gradients of keys and values.

        The last slice's backward, which runs first, allocates those of all other slices; each of these frees its own.
        """
        if self.slices == 1:
            return 0, 0
        last = np.arange(self.longer.shape[1]) % self.slices == self.slices - 1
        of_slice = self._column(self.costs.key_value_gradient) * np.broadcast_to(self.scale, self.longer.shape)
        of_sequence = of_slice.reshape(len(of_slice), -1, self.slices).sum(axis=2).repeat(self.slices, axis=1)
        return np.where(last, of_sequence - of_slice, 0), np.where(last, 0, of_slice)

    def _workspace_bytes(self, workspace: PerStage | None) -> Numbers:
        """Peak bytes that a fused recomputation adds."""
        dropped = self.activation - self.saved
        peak = dropped if workspace is None else np.minimum(self._column(workspace), dropped)
        result: Numbers = np.where(self.fused, peak, 0) * self.scale
        return result

    def _times(self) -> dict[Kind, Numbers]:
        """Times by kind."""
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
            share = self._activation_share(self._fractions(self.op_costs.offload_fraction))
            time |= {Kind.O: column(costs.offload) * share * scale, Kind.L: column(costs.reload) * share * scale}
        return time

    def _with_attention(self, time: Numbers, attention: PerStage, share: Number | Numbers = 1) -> Numbers:
        """Add to times the additional attention time of slices or micro-batches with more keys."""
        if self.costs.attention_scale is None:
            return time
        result: Numbers = time + self._column(attention) * share * self.longer
        return result

    def _activation_share(self, share: Numbers) -> Numbers:
        """Convert a fraction of the movable bytes to a fraction of the full activation."""
        partly = (self.movable != self.activation) & (self.activation != 0)
        result: Numbers = np.where(partly, share * self.movable / np.where(partly, self.activation, 1), share)
        return result

    def _column(self, values: Iterable[Number]) -> Numbers:
        return np.array(tuple(values), dtype=self.dtype)[:, None]

    def _fractions(self, shares: Shares) -> Numbers:
        columns = max((len(fractions) for _, fractions in all_shares(shares)), default=1)
        result: Numbers = np.full((self.costs.stages, columns), 1, dtype=self.dtype)
        for stage, fractions in all_shares(shares):
            result[stage] = fractions
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
