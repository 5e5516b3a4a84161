"""Checks that a schedule is a correct order of one training step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from debubble.errors import ScheduleError
from debubble.ir.ops import BACKWARDS, CODE, SCHEDULED, TRANSFERS, Kind, Op
from debubble.ir.schedule import Schedule, all_shares


def check(schedule: Schedule) -> None:
    """Check that a schedule is a correct order of one training step.

    Every (stage, micro-batch) has one F and either one B or one I and one W, on the stage's device; the order within a
    device is F, O, L, R, B or I, W.  All entries refer to stages, boundaries and devices of the schedule.  Lowering
    detects deadlocks between devices.

    Raises:
        ScheduleError: With the operation or the entry that is wrong.
    """
    p = schedule.placement
    if schedule.micro_batches < 1:
        raise ScheduleError(f"A step needs at least one micro-batch, not {schedule.micro_batches}.")
    if len(schedule.orders) != p.devices:
        raise ScheduleError(f"The schedule has {len(schedule.orders)} orders for {p.devices} devices.")
    _check_stages(schedule)
    _check_peers(schedule)
    _check_slices(schedule)
    _check_link_orders(schedule)
    if not _is_one_step(schedule):
        _check_operations(schedule)


def _check_stages(schedule: Schedule) -> None:
    """All stages in entries are stages of the schedule, and all fractions are between 0 and 1."""
    fractions = {"recompute_fraction": schedule.recompute_fraction, "offload_fraction": schedule.offload_fraction}
    for name, stages in {"fused_recompute": schedule.fused_recompute, **fractions}.items():
        for stage in stages:
            if stage not in range(schedule.stages):
                raise ScheduleError(f"'{name}' names stage {stage}, but the schedule has {schedule.stages} stages.")
    for name, shares in fractions.items():
        for stage, fractions_of_stage in all_shares(shares):
            count = len(fractions_of_stage)
            if isinstance(shares[stage], tuple) and count != schedule.micro_batches:
                raise ScheduleError(
                    f"'{name}' of stage {stage} has {count} shares for {schedule.micro_batches} micro-batches."
                )
            for share in fractions_of_stage:
                if not 0 <= share <= 1:
                    raise ScheduleError(f"'{name}' of stage {stage} must be between 0 and 1, not {share}.")
    for stage, j in schedule.deeper:
        if stage not in range(schedule.stages) or j not in range(schedule.micro_batches):
            raise ScheduleError(
                f"'deeper' names micro-batch {j} of stage {stage}, but the schedule has {schedule.stages} stages and"
                f" {schedule.micro_batches} micro-batches."
            )
    for stage in schedule.asynchronous:
        if stage not in range(schedule.stages - 1):
            raise ScheduleError(
                f"'asynchronous' names the boundary after stage {stage}, but the schedule has {schedule.stages} stages."
            )


def _check_peers(schedule: Schedule) -> None:
    for device, peer in schedule.peers.items():
        for named in (device, peer):
            if named not in range(schedule.devices):
                raise ScheduleError(f"'peers' names device {named}, but the schedule has {schedule.devices} devices.")
        if device == peer:
            raise ScheduleError(f"'peers' lets device {device} offload to itself.")


def _check_link_orders(schedule: Schedule) -> None:
    served: set[Op] = set()
    for op in itertools.chain.from_iterable(schedule.link_orders):
        if op.kind not in TRANSFERS or op not in schedule.operations:
            raise ScheduleError(f"'link_orders' names {op.name}, which is no transfer of the schedule.")
        if op in served:
            raise ScheduleError(f"'link_orders' names {op.name} twice.")
        served.add(op)


def _check_slices(schedule: Schedule) -> None:
    """The slices of a sequence run forwards in their order, and backwards in reverse, on every stage."""
    slices = schedule.slices
    if slices < 1 or schedule.micro_batches % slices:
        raise ScheduleError(f"{schedule.micro_batches} micro-batches are not whole sequences of {slices} slices.")
    if slices == 1:
        return
    for order in schedule.orders:
        before: dict[tuple[bool, int, int], Op] = {}
        for op in order:
            forward = op.kind is Kind.F
            if forward or op.kind in BACKWARDS:
                sequence, index = divmod(op.micro_batch, slices)
                last = before.get((forward, op.stage, sequence))
                expected = (
                    (0 if forward else slices - 1)
                    if last is None
                    else last.micro_batch % slices + (1 if forward else -1)
                )
                if index != expected:
                    raise ScheduleError(
                        f"{op.name} is slice {index} of its sequence, where slice {expected} comes next: slices go"
                        " forwards in their order, and backwards in the opposite one."
                    )
                before[forward, op.stage, sequence] = op


def _is_one_step(schedule: Schedule) -> bool:
    """Check all operations at once, for speed; where this is False, `_check_operations` finds the error, if any."""
    stages, micro_batches = schedule.stages, schedule.micro_batches
    ops = tuple(itertools.chain.from_iterable(schedule.orders))
    if len(ops) < 2 * stages * micro_batches:
        return False
    if not all(0 <= op.stage < stages and 0 <= op.micro_batch < micro_batches for op in ops):
        return False
    _, stage, _, device = schedule.arrays
    listed = schedule.positions >= 0
    # S is rare, and has separate rules.
    if not {op.kind for op in ops} <= {*SCHEDULED} - {Kind.S} or np.count_nonzero(listed) < len(ops):
        return False
    if not np.array_equal(np.array(schedule.placement.device_of)[stage], device):
        return False
    chain = schedule.positions[[CODE[kind] for kind in _CHAIN]]
    in_order = (chain[1:] < 0) | (chain[1:] > np.maximum.accumulate(chain)[:-1])
    F, O, L, _, B, I, W = listed[[CODE[kind] for kind in _CHAIN]]  # noqa: E741
    return bool(np.all(in_order) and np.all(F & (B ^ I) & (I == W) & (O == L)))


def _check_operations(schedule: Schedule) -> None:
    """Raise ScheduleError for the first operation that is wrong."""
    position: dict[Op, int] = {}
    for device, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            _check_op(schedule, device, op, position)
            position[op] = index
    for stage in range(schedule.stages):
        for j in range(schedule.micro_batches):
            _check_micro_batch(stage, j, position)
    _check_once_per_step(position)


def _check_op(schedule: Schedule, device: int, op: Op, seen: Mapping[Op, int]) -> None:
    if op.kind not in SCHEDULED:
        raise ScheduleError(f"{op.name} is a message; schedules hold none, lowering adds them.")
    if not 0 <= op.stage < schedule.stages or not 0 <= op.micro_batch < schedule.micro_batches:
        raise ScheduleError(
            f"{op.name} is outside the {schedule.stages} stages and {schedule.micro_batches} micro-batches."
        )
    if schedule.placement.device_of[op.stage] != device:
        raise ScheduleError(
            f"{op.name} is on device {device}, but its stage is on device {schedule.placement.device_of[op.stage]}."
        )
    if op in seen:
        raise ScheduleError(f"{op.name} appears twice.")


_CHAIN = (Kind.F, Kind.O, Kind.L, Kind.R, Kind.B, Kind.I, Kind.W)


def _check_micro_batch(stage: int, j: int, position: Mapping[Op, int]) -> None:
    chain = [(kind, position[op]) for kind in _CHAIN if (op := Op(kind, stage, j)) in position]
    kinds = {kind for kind, _ in chain}
    for (kind, index), (next_kind, next_index) in itertools.pairwise(chain):
        if index > next_index:
            raise ScheduleError(f"{Op(next_kind, stage, j).name} comes before {Op(kind, stage, j).name}.")
    if Kind.F not in kinds:
        raise ScheduleError(f"{Op(Kind.F, stage, j).name} is missing.")
    if not kinds & set(BACKWARDS):
        raise ScheduleError(f"The backward of stage {stage}, micro-batch {j} is missing.")
    if Kind.B in kinds and kinds & {Kind.I, Kind.W}:
        raise ScheduleError(f"Stage {stage}, micro-batch {j} has both a full and a split backward.")
    if (Kind.I in kinds) != (Kind.W in kinds):
        missing = Kind.W if Kind.I in kinds else Kind.I
        raise ScheduleError(f"{Op(missing, stage, j).name} is missing.")
    if (Kind.O in kinds) != (Kind.L in kinds):
        missing = Kind.L if Kind.O in kinds else Kind.O
        raise ScheduleError(f"{Op(missing, stage, j).name} is missing: what is offloaded must be reloaded, once.")


def _check_once_per_step(position: Mapping[Op, int]) -> None:
    """S follows the stage's last backward, its G and its D; a stage steps at most once."""
    last: dict[int, int] = {}
    for op, index in position.items():
        if op.kind in (Kind.B, Kind.W, Kind.G, Kind.D):
            last[op.stage] = max(last.get(op.stage, -1), index)
    stepped: set[int] = set()
    for op, index in position.items():
        if op.kind is not Kind.S:
            continue
        if op.stage in stepped:
            raise ScheduleError(f"Stage {op.stage} has two optimizer steps.")
        stepped.add(op.stage)
        if index < last[op.stage]:
            raise ScheduleError(f"{op.name} comes before the stage's last backward or gradient transfer.")
