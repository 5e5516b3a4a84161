"""Lowering: Schedule + costs -> Program.

Lowering adds messages between devices and gathers of sharded parameters, assigns every operation its lane, time and
memory effects, and makes all dependencies explicit waits.  It works on arrays of all operations.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from debubble.argument_types import with_checked_types
from debubble.errors import InputError
from debubble.ir.arrays import Bools, Edges, Ints, edges, entries
from debubble.ir.lowering.admission import Admission
from debubble.ir.lowering.contention import Rendezvous, share_links
from debubble.ir.lowering.gathers import with_gathers
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.ops import KINDS, RESHARDS, UNSHARDS, Kind, Lane
from debubble.ir.program import END, LANE_CODE, MOMENTS, NO_PEER, START, STREAM, Program, QueueArrays
from debubble.ir.schedule import OpArrays, Schedule
from debubble.ir.schedule_checks import check
from debubble.ir.stage_costs import Number, PerStage, StageCosts

_LANES = {
    Kind.F: Lane.COMPUTE, Kind.B: Lane.COMPUTE, Kind.I: Lane.COMPUTE, Kind.W: Lane.COMPUTE, Kind.R: Lane.COMPUTE,
    Kind.S: Lane.COMPUTE, Kind.O: Lane.D2H, Kind.D: Lane.D2H, Kind.L: Lane.H2D, Kind.P: Lane.H2D,
    Kind.G: Lane.REDUCE, Kind.SEND_F: Lane.SEND, Kind.SEND_B: Lane.SEND, Kind.RECV_F: Lane.RECV,
    Kind.RECV_B: Lane.RECV,
    **dict.fromkeys(UNSHARDS, Lane.REDUCE), **dict.fromkeys(RESHARDS, Lane.COMPUTE),
}  # fmt: skip
_LANE_OF = np.array([LANE_CODE[_LANES[kind]] for kind in KINDS])

F, B, I, W, R, O, L, G, D, S, P, SEND_F, RECV_F, SEND_B, RECV_B = range(15)  # noqa: E741 - the codes of KINDS
UNSHARD_F, UNSHARD_R, UNSHARD_B = range(15, 18)
COMPUTE, SEND, RECV, D2H, H2D, HOST, _ = range(len(LANE_CODE))
NONE = -1


@with_checked_types()
def lower(schedule: Schedule, costs: StageCosts) -> Program:
    """Make everything implicit in a schedule explicit.

    Args:
        schedule: The order of operations on each device.
        costs: Times (seconds, or an abstract unit) and sizes (bytes, or an abstract unit) of each stage.

    Returns:
        The program: every operation and message on its lane, with its time, waits and memory effects.

    Raises:
        ScheduleError: If the schedule is not a correct step.
        OutOfMemoryError: If an operation can never start under `costs.memory_limit`.
        InputError: If schedule and costs do not match.
        DeadlockError: If `blocking` messages cannot be ordered.

    Example:
        >>> program = lower(db.schedules["1f1b"](devices=4, micro_batches=8), db.StageCosts.of(stages=4))
    """
    check(schedule)
    check_costs(schedule, costs)
    program = _Lowering(schedule, costs).program()
    return share_links(program) if costs.link_groups else program


def lower_forwards(schedule: Schedule, costs: StageCosts) -> Program:
    """Lower only the forwards of a schedule, for evaluation.

    Forwards save nothing, so there is no recomputation, no offload and no memory limit.  Raises InputError if schedule
    and costs do not match.
    """
    check_costs(schedule, costs)
    forwards = Schedule(
        name=f"{schedule.name} (forwards)",
        placement=schedule.placement,
        micro_batches=schedule.micro_batches,
        orders=tuple(tuple(op for op in order if op.kind is Kind.F) for order in schedule.orders),
        asynchronous=schedule.asynchronous,
        slices=schedule.slices,
    )
    return _Lowering(forwards, costs.replace(memory_limit=None)).program()


class _Lowering:
    """Builds a program, whose instructions are the operations device by device, then send and receive per message."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        schedule = with_gathers(schedule) if costs.gathers else schedule
        self.schedule, self.costs = schedule, costs
        self.operations = ops = schedule.arrays
        self.device_of = np.array(schedule.placement.device_of)
        self.waits: list[tuple[Ints, Ints, Ints]] = []

        # A message follows every F and backward whose consumer is on another device, in the producers' order.
        forward = ops.kind == F
        consumer = ops.stage + np.where(forward, 1, -1)
        sends = np.where(forward, consumer < schedule.stages, _one_of(ops.kind, B, I) & (consumer >= 0))
        sends &= self.device_of[consumer % schedule.stages] != ops.device
        self.producer = np.flatnonzero(sends)
        forward, producer_stage, consumer = forward[sends], ops.stage[sends], consumer[sends]
        micro_batch, sender, receiver = ops.micro_batch[sends], ops.device[sends], self.device_of[consumer]
        self.send = len(ops.kind) + 2 * np.arange(len(consumer))
        self.receive = self.send + 1
        peers = np.full(schedule.devices, NO_PEER)
        peers[[*schedule.peers]] = [*schedule.peers.values()]

        self.kind = _with_messages(ops.kind, np.where(forward, SEND_F, SEND_B), np.where(forward, RECV_F, RECV_B))
        self.stage = _with_messages(ops.stage, producer_stage, consumer)
        self.micro_batch = _with_messages(ops.micro_batch, micro_batch, micro_batch)
        self.device = _with_messages(ops.device, sender, receiver)
        self.peer = _with_messages(np.where(_one_of(ops.kind, O, L), peers[ops.device], NO_PEER), receiver, sender)
        host_step = np.isin(self.stage, [*schedule.host_steps])
        self.lane = np.where((self.kind == S) & host_step, HOST, _LANE_OF[self.kind])
        self.index = schedule.positions.copy()
        """The instruction of every operation, by kind, stage and micro-batch; NONE if there is none."""
        self.index[self.kind, self.stage, self.micro_batch] = np.arange(len(self.kind))

        asynchronous = np.isin(np.minimum(producer_stage, consumer), [*schedule.asynchronous])
        self.blocking = ~asynchronous & (costs.communication_model == "blocking")
        """Per message, True if it occupies the compute lanes of both ends."""
        self.awaited = ~asynchronous & (costs.communication_model == "receiver")
        """Per message, True if it is sent only when its receiver has reached the operation that needs it."""
        self.lane[self.send[self.blocking]] = self.lane[self.receive[self.blocking]] = COMPUTE
        self._price()

    def program(self) -> Program:
        """Build the program with all queues and waits."""
        queues = self._queues()
        self._wait_for_messages(queues)
        self._wait_for_data()
        if self.costs.memory_limit is not None:
            self._wait_for_memory()
        self._wait_for_peers()
        if self.costs.host_link == "half-duplex":
            self._serialize_transfers()
        for link in self.schedule.link_orders:
            kind, stage, micro_batch, _ = OpArrays.from_orders([link])
            served = self.index[kind, stage, micro_batch]
            self._wait(served[1:], served[:-1])
        return Program(
            schedule=self.schedule,
            costs=self.costs,
            kind=self.kind,
            stage=self.stage,
            micro_batch=self.micro_batch,
            device=self.device,
            lane=self.lane,
            peer=self.peer,
            duration=self.duration,
            lead=self.lead,
            allocated=self.allocated,
            freed=self.freed,
            waits=self._edges(),
            queue_arrays=queues,
        )

    def _price(self) -> None:
        """Look up times and bytes of all instructions; send and receive of a blocking message take the same time."""
        explicit = self.index[R, self.stage, self.micro_batch] != NONE
        self.tables = OpCosts.from_schedule(self.schedule, self.costs).tables(explicit=bool(explicit.any()))
        levels = self.schedule.levels(explicit, self.stage, self.micro_batch)
        indices = self.tables.indices(levels, self.kind, self.stage, self.micro_batch)
        indices[self.receive[self.blocking]] = indices[self.send[self.blocking]]
        self.duration, self.allocated, self.freed, self.lead = (entries(table, indices) for table in self.tables)

    def _wait(self, after: Ints, other: Ints, *, moment: int = END) -> None:
        """Add waits: `after[i]` waits for a moment of `other[i]`."""
        self.waits.append((after, other, np.full(len(after), moment)))

    def _stream(self, after: Ints, other: Ints, overlap: PerStage) -> None:
        """Add waits of `after[i]` for `other[i]`: for STREAM if the stage's units stream, else for its end.

        Transfers to peer devices do not stream.
        """
        overlaps = np.array([share > 0 for share in overlap])[self.stage[after] if len(overlap) > 1 else 0]
        streams = overlaps & (self.peer[after] == NO_PEER) & (self.peer[other] == NO_PEER)
        self._wait(after[streams], other[streams], moment=STREAM)
        self._wait(after[~streams], other[~streams])

    def _edges(self) -> Edges:
        """All waits without duplicates."""
        after, other, moment = (np.concatenate(arrays) for arrays in zip(*self.waits, strict=True))
        _, unique = np.unique((after * len(self.kind) + other) * len(MOMENTS) + moment, return_index=True)
        unique.sort()
        return edges(len(self.kind), after[unique], other[unique], moment[unique])

    def _queues(self) -> QueueArrays:
        """Build a queue per device and lane, and for messages per direction and peer."""
        in_order = np.ones(len(self.kind), dtype=np.bool_)
        for ends in (self.send, self.receive):
            in_order[ends[self.blocking]] = False
        members = np.flatnonzero(in_order)
        peer = np.where(_one_of(self.kind, O, L), NO_PEER, self.peer)
        key = ((self.device * len(LANE_CODE) + self.lane) * (self.schedule.devices + 1) + peer + 1)[members]
        _, first, queue_of = np.unique(key, return_index=True, return_inverse=True)
        by_appearance = np.argsort(first)
        ends = np.cumsum(np.bincount(queue_of)[by_appearance])
        rank = np.empty_like(by_appearance)
        rank[by_appearance] = np.arange(len(rank))
        lists = np.split(members[np.argsort(rank[queue_of], kind="stable")], ends[:-1])
        heads = members[first[by_appearance]]
        lane = self.lane[heads]
        if self.blocking.any():
            placed = self._rendezvous()
            for queue in np.flatnonzero(lane == COMPUTE):
                lists[queue] = placed[self.device[heads[queue]]]
        asynchronous = _one_of(lane, SEND, RECV) & (self.costs.communication_model in ("latency", "receiver"))
        return QueueArrays(
            device=self.device[heads],
            lane=lane,
            peer=peer[heads],
            exclusive=~asynchronous,
            first=np.cumsum([0, *map(len, lists)]),
            instructions=np.concatenate(lists),
        )

    def _rendezvous(self) -> list[Ints]:
        """The order of compute operations and blocking messages on every device."""
        computes = np.flatnonzero(self._computes)
        messages = np.stack((self.send, self.receive), axis=1).tolist()
        rendezvous = Rendezvous(
            operations=[op for order in self.schedule.orders for op in order],
            device=self.device.tolist(),
            duration=self.duration.tolist(),
            needed=self._producers.tolist(),
            messages=dict(zip(self.producer.tolist(), messages, strict=True)),
            blocking={*self.producer[self.blocking].tolist()},
            compute=[computes[self.device[computes] == d].tolist() for d in range(self.schedule.devices)],
        )
        return [np.array(order) for order in rendezvous.orders()]

    def _wait_for_messages(self, queues: QueueArrays) -> None:
        self._wait(self.send, self.producer)
        self._wait(self.receive[~self.blocking], self.send[~self.blocking])
        if self.awaited.any():
            self._wait(*self._awaited_sends())
        if self.blocking.any():
            # Both ends start at the same time, when both lanes are free.
            send, receive = self.send[self.blocking], self.receive[self.blocking]
            self._wait(receive, send, moment=START)
            before = np.full(len(self.kind), NONE)
            before[queues.instructions[1:]] = queues.instructions[:-1]
            before[queues.instructions[queues.first[:-1]]] = NONE
            waits = before[receive] != NONE
            self._wait(send[waits], before[receive[waits]])

    def _awaited_sends(self) -> tuple[Ints, Ints]:
        """Sends of awaited messages, with the operations that their receivers compute before they wait.

        A message overlaps with a recomputation right before the backward that needs it.
        """
        kind, device = self.operations.kind, self.operations.device
        computes = np.flatnonzero(self._computes)
        before = np.full(len(kind) + 1, NONE)  # the last entry is for index NONE
        first = np.diff(device[computes], prepend=NONE) != 0
        before[computes] = np.where(first, NONE, np.roll(computes, 1))
        sends, received = self.send[self.awaited], self.receive[self.awaited]
        here = self.stage[received], self.micro_batch[received]
        backward = np.where(self.index[I, *here] != NONE, self.index[I, *here], self.index[B, *here])
        last = before[np.where(self.kind[received] == RECV_F, self.index[F, *here], backward)]
        recompute = self.index[R, *here]
        last = np.where((recompute != NONE) & (last == recompute), before[recompute], last)
        return sends[last != NONE], last[last != NONE]

    def _wait_for_data(self) -> None:
        kind, stage, micro_batch, device = self.operations
        here = (stage, micro_batch)
        loads = self._parameter_loads()
        self._wait(*loads[loads[:, 1] < loads[:, 0]].T)

        # Consumers on another device wait for the message.
        needed = self._producers
        users = np.flatnonzero(needed != NONE)
        other = needed[users]
        received = self.index[np.where(kind[users] == F, RECV_F, RECV_B), stage[users], micro_batch[users]]
        self._wait(users, np.where(device[other] == device[users], other, received))

        reload, offload = self.index[L, *here], self.index[O, *here]
        back, recomputed = reload != NONE, self.index[R, *here] != NONE
        recomputes, backwards = np.flatnonzero((kind == R) & back), _one_of(kind, B, I) & back
        self._stream(recomputes, reload[recomputes], self.costs.recompute_overlap)
        streaming, after_recompute = np.flatnonzero(backwards & ~recomputed), np.flatnonzero(backwards & recomputed)
        self._stream(streaming, reload[streaming], self.costs.reload_overlap)
        # A recomputation ends no earlier than its reload.
        self._wait(after_recompute, reload[after_recompute])
        offloads, reloads = np.flatnonzero(kind == O), np.flatnonzero(kind == L)
        self._stream(offloads, self.index[F, *here][offloads], self.costs.offload_overlap)
        self._wait(reloads, offload[reloads])

        # G, D and S follow the operations on the stage's gradients, in the order of the list.
        gradients = np.flatnonzero(_one_of(kind, B, W, G, D))
        gradients = gradients[np.argsort(stage[gradients], kind="stable")]
        users = np.flatnonzero(_one_of(kind, G, D, S))
        count = len(kind)
        position = np.searchsorted(stage[gradients] * count + gradients, stage[users] * count + users) - 1
        last = gradients[position]
        follows = (position >= 0) & (stage[last] == stage[users])
        self._wait(users[follows], last[follows])

        # A reload starts no earlier than the compute operation before it.
        self._wait(*self._last_before(kind == L, self._computes), moment=START)
        if self.costs.gathers:
            self._wait_for_parameters(loads)
        self._wait(*loads[loads[:, 1] > loads[:, 0]].T)

    def _wait_for_parameters(self, loads: Ints) -> None:
        """Let the first user of gathered parameters wait for the gather, and the gather for loads from the host.

        Like a reload, a gather starts no earlier than the compute operation before it, which freed the memory for it.
        """
        kind, stage, micro_batch, _ = self.operations
        gathers = _one_of(kind, UNSHARD_F, UNSHARD_R, UNSHARD_B)
        self._wait(*self._last_before(gathers, self._computes), moment=START)
        for gather, *users in ((UNSHARD_F, F), (UNSHARD_R, R), (UNSHARD_B, B, I)):
            using = np.flatnonzero(_one_of(kind, *users))
            gathered = self.index[gather, stage[using], micro_batch[using]]
            self._wait(using[gathered != NONE], gathered[gathered != NONE])
        for forward, load in loads.tolist():
            before = np.flatnonzero(gathers[:forward] & (stage[:forward] == stage[forward]))
            self._wait(before[-1:], np.full(len(before[-1:]), load))

    @cached_property
    def _computes(self) -> Bools:
        computes: Bools = self.lane[: len(self.operations.kind)] == COMPUTE
        return computes

    @cached_property
    def _producers(self) -> Ints:
        """For every operation, the one whose result it uses: for F on the previous stage, for B and I on the next."""
        kind, stage, micro_batch, _ = self.operations
        before = self.index[F, stage - 1, micro_batch]
        after = (np.minimum(stage + 1, self.schedule.stages - 1), micro_batch)
        backward = np.where(self.index[I, *after] != NONE, self.index[I, *after], self.index[B, *after])
        forwards, backwards = (kind == F) & (stage > 0), _one_of(kind, B, I) & (stage + 1 < self.schedule.stages)
        needed: Ints = np.where(forwards, before, np.where(backwards, backward, NONE))
        return needed

    def _last_before(self, users: Bools, predecessors: Bools) -> tuple[Ints, Ints]:
        """The users with a predecessor in their device's list, and the last predecessor before each of them."""
        indices = np.arange(len(users))
        last = np.maximum.accumulate(np.where(predecessors, indices, NONE))
        first = np.searchsorted(self.operations.device, self.operations.device)
        users = users & (last >= first)
        return indices[users], last[users]

    def _parameter_loads(self) -> Ints:
        """Pairs of the first forward that uses P's parameters, and P; later forwards are queued after that one."""
        kind, stage, micro_batch, _ = self.operations
        pairs = []
        for load in np.flatnonzero(kind == P).tolist():
            users = (kind == F) & (stage == stage[load]) & (micro_batch >= micro_batch[load])
            if users.any():
                pairs.append((int(np.argmax(users)), load))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def _wait_for_memory(self) -> None:
        hosted = self._hosted_bytes()
        begin = 0
        for device, order in enumerate(self.schedule.orders):
            limit = self.costs.limit_of(device)
            assert limit is not None
            used = self.costs.static_of(device) + hosted.get(device, 0)
            admission = Admission(self.schedule, self.costs, device, self.tables, used, limit)
            self._wait(*(np.array([*admission.waits()], dtype=np.int64).reshape(-1, 2).T + begin))
            begin += len(order)

    def _hosted_bytes(self) -> dict[int, Number]:
        """Peak bytes that every device holds for its peers."""
        kind, _, _, device = self.operations
        peaks: dict[int, Number] = {}
        for owner, host in self.schedule.peers.items():
            moves = np.flatnonzero(_one_of(kind, O, L) & (device == owner))
            hosted = np.cumsum(np.where(kind[moves] == O, self.freed[moves], -self.allocated[moves]))
            peaks[host] = peaks.get(host, 0) + max([0, *hosted.tolist()])
        return peaks

    def _wait_for_peers(self) -> None:
        """Let offloads to a peer wait for the reloads before them in the list, whose freed memory admission counts."""
        kind, peer = self.operations.kind, self.peer[: len(self.operations.kind)]
        self._wait(*self._last_before((kind == O) & (peer != NO_PEER), kind == L))

    def _serialize_transfers(self) -> None:
        """Half duplex: a device's transfers run one at a time, in the order of its list."""
        device = self.operations.device
        transfers = np.flatnonzero(_one_of(_LANE_OF[self.operations.kind], D2H, H2D))
        before, after = transfers[:-1], transfers[1:]
        same_device = device[before] == device[after]
        self._wait(after[same_device], before[same_device])


def _one_of(values: Ints, *wanted: int) -> Bools:
    """A mask of the values that are one of `wanted`."""
    result: Bools = np.logical_or.reduce([values == value for value in wanted])
    return result


def _with_messages(operations: Ints, sends: Ints, receives: Ints) -> Ints:
    """Entries of operations, followed by send and receive per message."""
    return np.concatenate((operations, np.stack((sends, receives), axis=1).ravel()))


def check_costs(schedule: Schedule, costs: StageCosts) -> None:
    """Raise InputError if schedule and costs do not match."""
    if costs.stages != schedule.stages:
        raise InputError(f"The costs are for {costs.stages} stages, but the schedule has {schedule.stages}.")
    costs.check_for(devices=schedule.devices, micro_batches=schedule.micro_batches)
    if costs.slices not in (1, schedule.slices):
        raise InputError(
            f"The costs are for {costs.slices} slices of a sequence, but the schedule"
            f" '{schedule.name}' has {schedule.slices}."
        )
    for device, stages in enumerate(schedule.placement.stages_of):
        capacity = costs.gathered_bytes(stages)
        if capacity > costs.static_of(device):
            raise InputError(
                f"'static' of device {device} is {costs.static_of(device)}, which has no room for the parameters that"
                f" it gathers, those of two stages at a time ({capacity}): add them to it."
            )
    if schedule.deeper and costs.recompute_deeper is None:
        raise InputError(
            f"The schedule '{schedule.name}' recomputes deeper for some micro-batches, but the costs have no"
            " 'recompute_deeper'."
        )
    if schedule.offloaded and costs.offload is None:
        raise InputError(f"The schedule '{schedule.name}' offloads, but the costs have no 'offload' time.")
