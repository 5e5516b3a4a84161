"""The cost of each operation: its time, and the bytes that it allocates at its start and frees at its end.

This law stands here alone: simulation, pricing and search read its tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from debubble.ir.arrays import Bools, Ints, Numbers
from debubble.ir.ops import CODE, KINDS, RESHARDS, UNSHARDS, Kind, Op
from debubble.ir.schedule import Schedule
from debubble.ir.stage_costs import Number, PerStage, StageCosts


class Tables(NamedTuple):
    """Costs by [R in list, kind, stage, micro-batch]; the last axis has one entry if all micro-batches are alike.

    `R in list` is 1 for the operations of a stage and micro-batch that an R recomputes.
    """

    time: Numbers
    allocated: Numbers
    """Bytes at the start of an operation."""
    freed: Numbers
    """Bytes at its end."""

    def at(self, explicit: Bools, kind: Ints, stage: Ints, micro_batch: Ints) -> Ints:
        """Return the places of operations in the raveled tables."""
        _, kinds, stages, scales = self.time.shape
        column = micro_batch if scales > 1 else 0
        where: Ints = ((explicit * kinds + kind) * stages + stage) * scales + column
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
    recompute_fraction: Mapping[int, Number] = field(default_factory=dict)
    offload_fraction: Mapping[int, Number] = field(default_factory=dict)
    host_steps: frozenset[int] = frozenset()

    @staticmethod
    def of(schedule: Schedule, costs: StageCosts) -> OpCosts:
        """The costs of a schedule's operations."""
        return OpCosts(
            costs=costs,
            fused_recompute=schedule.fused_recompute,
            recompute_fraction=schedule.recompute_fraction,
            offload_fraction=schedule.offload_fraction,
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

    def tables(self, *, dtype: Any = object, explicit: bool = True) -> Tables:
        """All costs; exact with dtype object.  Without `explicit` they hold no entries for what an R recomputes."""
        kept = self._half(dtype, False)
        if not explicit:
            return Tables(*(table[None] for table in kept))
        return Tables(*(np.stack(both) for both in zip(kept, self._half(dtype, True), strict=True)))

    @cached_property
    def _exact(self) -> Tables:
        return self.tables()

    def _entry(self, table: Numbers, op: Op, explicit: bool) -> Number:
        column = op.micro_batch if table.shape[-1] > 1 else 0
        number: Number = table[int(explicit), CODE[op.kind], op.stage, column]
        return number

    def _half(self, dtype: Any, explicit: bool) -> Tables:
        """Tables by [kind, stage, micro-batch], for what an R recomputes or for all else."""
        costs = self.costs
        scale = np.array([costs.micro_batch_scale or (1,)], dtype=dtype)

        # Each of these has a row per stage and one column.
        def numbers(values: Iterable[Number]) -> Numbers:
            return np.array(tuple(values), dtype=dtype)[:, None]

        def fractions(given: Mapping[int, Number]) -> Numbers:
            return numbers(given.get(stage, 1) for stage in range(costs.stages))

        def stages(chosen: Iterable[int]) -> Bools:
            mask = np.zeros((costs.stages, 1), dtype=np.bool_)
            mask[list(chosen)] = True
            return mask

        fused = stages(() if explicit else self.fused_recompute)
        whole, share = numbers(costs.activation), fractions(self.offload_fraction)
        dropped = (whole - numbers(costs.activation_recomputed)) * fractions(self.recompute_fraction)
        remaining = np.where(fused | explicit, whole - dropped, whole)
        partly = (remaining != whole) & (whole != 0)
        moved_share = np.where(partly, share * remaining / np.where(partly, whole, 1), share)
        dropped = whole - remaining

        def brought_back(workspace: PerStage | None) -> Numbers:
            """Bytes that a fused recomputation brings back at a time."""
            most = dropped if workspace is None else np.minimum(numbers(workspace), dropped)
            result: Numbers = np.where(fused, most, 0) * scale
            return result

        kept, moved, after = remaining * scale, remaining * share * scale, numbers(costs.activation_after_input) * scale
        before_backward = whole * scale if explicit else kept
        restored = brought_back(costs.recompute_workspace)
        again_input = brought_back(costs.recompute_workspace_input or costs.recompute_workspace)
        before_input = before_backward + again_input
        allocated = {
            Kind.F: kept,
            Kind.R: whole * scale - kept,
            Kind.L: moved,
            Kind.B: restored,
            Kind.I: again_input + np.maximum(after - before_input, 0),
        }
        freed = {
            Kind.O: moved,
            Kind.B: before_backward + restored,
            Kind.I: np.maximum(before_input - after, 0),
            Kind.W: after,
        }
        gathered = numbers(costs.gathered)
        allocated |= dict.fromkeys(UNSHARDS, gathered)
        freed |= dict.fromkeys(RESHARDS, gathered)

        recompute = numbers(costs.recompute) * fractions(self.recompute_fraction)
        backward_input, backward_weight = numbers(costs.backward_input), numbers(costs.backward_weight)
        backward = backward_input + backward_weight
        communication = numbers(costs.communication)
        time = {
            Kind.F: numbers(costs.forward) * scale,
            Kind.B: np.where(fused, backward + recompute, backward) * scale,
            Kind.I: np.where(fused, backward_input + recompute, backward_input) * scale,
            Kind.W: backward_weight * scale,
            Kind.R: recompute * scale,
            Kind.SEND_F: communication * scale,
            Kind.SEND_B: communication[np.arange(costs.stages) - 1] * scale,
            Kind.S: np.where(stages(self.host_steps), numbers(costs.host_step), numbers(costs.optimizer_step)),
            Kind.G: numbers(costs.gradient_reduce),
            Kind.D: numbers(costs.gradient_offload),
            Kind.P: numbers(costs.parameter_load),
            **dict.fromkeys(UNSHARDS, numbers(costs.parameter_gather)),
        }
        if costs.offload is not None and costs.reload is not None:
            time[Kind.O] = numbers(costs.offload) * moved_share * scale
            time[Kind.L] = numbers(costs.reload) * moved_share * scale

        def table(rows: Mapping[Kind, Numbers]) -> Numbers:
            result: Numbers = np.zeros((len(KINDS), costs.stages, scale.shape[1]), dtype=dtype)
            for kind, row in rows.items():
                result[CODE[kind]] = row
            return result

        return Tables(table(time), table(allocated), table(freed))
