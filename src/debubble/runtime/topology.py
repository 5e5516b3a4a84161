"""The ranks of a run: replica, device and part of each, their groups, and what they must agree on before they run."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor

from debubble.ir import InputError, Kind, Lane, Plan, Program
from debubble.ir.ops import UNSHARDS
from debubble.runtime.assembly import DeviceGroups, tied_devices
from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.distributed.expert_parallel import ExpertGroup
from debubble.runtime.distributed.gradient_norm import NormRelay, PartialSums, finish_order, relay_channels
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.distributed.transport import Alone, Distributed, Transport
from debubble.runtime.execution.peer_offload import message_channels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

OVER_REPLICAS = frozenset((Kind.G, Kind.D, Kind.S, Kind.P, *UNSHARDS))
"""Kinds that sum or gather over replicas."""


class Ranks:
    """The ranks of a plan as one of them sees them: rank = (pipeline x devices + device) x tensor + part.

    Pipelines are numbered replica x context + slice.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan, self.transport = plan, transport
        at, self.part = divmod(transport.rank, plan.options.tensor)
        self._pipeline, self.device = divmod(at, plan.devices)
        self.replica, self.slice = divmod(self._pipeline, plan.options.context)
        """The batch that this rank has, and the slice of its sequences."""
        self.one_clock = True
        """Whether all ranks are on one host."""
        self._finish_order: tuple[int, ...] = ()

    def rank(self, pipeline: int, device: int, part: int) -> int:
        """The rank that is this part of this device in this pipeline."""
        return (pipeline * self._plan.devices + device) * self._plan.options.tensor + part

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """Device of this pipeline -> the rank that is this part of it."""
        return {d: self.rank(self._pipeline, d, self.part) for d in range(self._plan.devices)}

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """This pipeline's ranks that are this part of their device."""
        return tuple(self.rank_of.values())

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that are this part of this device in every pipeline: they share its parameters."""
        return tuple(self.rank(pipeline, self.device, self.part) for pipeline in self._sizes[0])

    @cached_property
    def experts(self) -> ExpertGroup:
        """The ranks that divide this device's experts among them."""
        return ExpertGroup(self.transport, self._expert_ranks(self._pipeline, self.device, self.part))

    @cached_property
    def over_expert_replicas(self) -> Replicas:
        """The ranks that have the same experts, and what they divide."""
        return self._over(self._same_experts(self._pipeline, self.device, self.part))

    @cached_property
    def groups(self) -> DeviceGroups:
        """The groups that this rank's stages know."""
        return DeviceGroups(self.over_replicas, self.tensor, self.context, self.experts, self.over_expert_replicas)

    @cached_property
    def context(self) -> ContextGroup:
        """The ranks that divide this one's sequences among them."""
        return ContextGroup(self.transport, self._slices(self.replica, self.device, self.part))

    @cached_property
    def over_replicas(self) -> Replicas:
        """The replicas of this device, and what they divide."""
        return self._over(self.replicas)

    @cached_property
    def tensor(self) -> TensorGroup:
        """The ranks that divide this device's stages among them."""
        ranks = tuple(self.rank(self._pipeline, self.device, part) for part in range(self._plan.options.tensor))
        return TensorGroup(self.transport, ranks, self.mesh["tp"] if len(ranks) > 1 and self.mesh else None)

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """All ranks as torch's own tools see them: dp (replicas) x cp (slices, if any) x pp (devices) x tp (parts).

        None where torch.distributed does not carry the messages.
        """
        options = self._plan.options
        slices = {"cp": options.context} if options.context > 1 else {}
        return self.transport.mesh({"dp": options.data, **slices, "pp": self._plan.devices, "tp": options.tensor})

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """This pipeline's ranks that each hold a copy of the tied table, if there are two."""
        return tuple(sorted(self.rank_of[d] for d in tied_devices(self._plan)))

    def first_per_device(self, values: Sequence[T]) -> list[T]:
        """Keep the values of replica 0's tensor rank 0 of each pipeline device.

        Args:
            values: One for every rank, by rank.
        """
        return [values[self.rank(0, device, 0)] for device in range(self._plan.devices)]

    @property
    def shares_table(self) -> bool:
        """True if another rank has a copy of this one's tied table."""
        return self.transport.rank in self.tied

    def sum_over_replicas(self, tensor: Tensor) -> None:
        """All-reduce (sum) the tensor over this device's replicas, in place."""
        self.transport.all_reduce(tensor, self.replicas)

    def sum_over_pipeline(self, tensor: Tensor) -> None:
        """All-reduce (sum) the tensor over this pipeline's ranks, in place."""
        self.transport.all_reduce(tensor, self.pipeline)

    def sum_over_tied(self, tensor: Tensor) -> None:
        """All-reduce (sum) the tensor over the two ranks with a copy of the tied table, in place."""
        self.transport.all_reduce(tensor, self.tied)

    def partial_sums(self, squares: float, loss: float, *, on: torch.device) -> PartialSums:
        """This device's sums, over its parts and all replicas, of squares that count on one of them each."""
        total = torch.tensor([squares, loss if self.part == 0 else 0.0], dtype=torch.float64, device=on)
        self.sum_over_replicas(total)
        self.tensor.sum(total)
        return PartialSums(*total.tolist())

    def total_sums(self, own: PartialSums, *, on: torch.device) -> PartialSums:
        """The sums of the whole pipeline, added in the order of the relay's turns; all its ranks wait for them."""
        slots = torch.zeros(self._plan.devices, 3, dtype=torch.float64, device=on)
        slots[self.device] = own.to_tensor()
        self.sum_over_pipeline(slots)
        return PartialSums.of(PartialSums.from_tensor(slots[device]) for device in self._finish_order)

    def open_relay(self) -> NormRelay:
        """Open the relay of partial sums along this pipeline.  All ranks call it."""
        relays = [[pipeline[d] for d in self._finish_order] for pipeline in self._pipelines()]
        self.transport.open([channel for ranks in relays for channel in relay_channels(ranks)], [])
        return NormRelay(self.transport, [self.rank_of[d] for d in self._finish_order])

    def open(self, program: Program, *, seed: int, own_model: bool) -> None:
        """Open everybody's channels and groups.  Raises InputError if the ranks are not to run the same."""
        self.check_same(self._plan, seed, own_model)
        self.one_clock = len(set(self.transport.gather(socket.gethostname()))) == 1
        self._finish_order = finish_order(program)
        sharing = self._groups_sharing_parameters()
        reducing = {i.lane: None for i in program.instructions if i.op.kind in OVER_REPLICAS}
        channels = [
            (ranks[a], ranks[b], what) for ranks in self._pipelines() for a, b, what in message_channels(program)
        ]
        self.transport.open(
            channels,
            [(ranks, Lane.COMPUTE) for ranks in (*self._groups_sharing_work(), *sharing, *self._groups_of_tied())]
            + [(ranks, lane) for lane in reducing for ranks in sharing],
        )

    def _groups_sharing_work(self) -> Iterator[tuple[int, ...]]:
        """The ranks of every pipeline, and those that divide its stages, sequences or experts among them."""
        options, (copies, devices, parts) = self._plan.options, self._sizes
        yield from self._pipelines()
        yield from (tuple(self.rank(c, d, p) for p in parts) for c in copies for d in devices)
        if options.context > 1:
            yield from (self._slices(r, d, p) for r in range(options.data) for d in devices for p in parts)
            yield from (
                tuple(self.rank(c, d, p) for c in copies[first :: options.context])
                for first in range(options.context)
                for d in devices
                for p in parts
            )
        if options.expert > 1:
            yield from (self._expert_ranks(c, d, p) for c in copies for d in devices for p in parts)

    def _groups_sharing_parameters(self) -> list[tuple[int, ...]]:
        """The ranks that have the same stages, and those that have the same experts."""
        copies, devices, parts = self._sizes
        groups = [tuple(self.rank(c, d, p) for c in copies) for d in devices for p in parts]
        if self._plan.options.expert > 1:
            groups += [self._same_experts(c, d, p) for c in copies for d in devices for p in parts]
        return groups

    def _groups_of_tied(self) -> Iterator[tuple[int, ...]]:
        """The ranks of every pipeline that have a copy of the tied table."""
        tied = tied_devices(self._plan)
        yield from (tuple(sorted(pipeline[d] for d in tied)) for pipeline in self._pipelines())

    @property
    def _sizes(self) -> tuple[range, range, range]:
        """Pipelines, devices and parts."""
        options = self._plan.options
        return range(options.data * options.context), range(self._plan.devices), range(options.tensor)

    def _pipelines(self) -> list[tuple[int, ...]]:
        """The ranks of every pipeline, of every part."""
        pipelines, devices, parts = self._sizes
        return [tuple(self.rank(c, d, p) for d in devices) for c in pipelines for p in parts]

    def _slices(self, replica: int, device: int, part: int) -> tuple[int, ...]:
        """The ranks that divide the sequences of a replica on this part of a device."""
        context = self._plan.options.context
        return tuple(self.rank(replica * context + piece, device, part) for piece in range(context))

    def _expert_ranks(self, pipeline: int, device: int, part: int) -> tuple[int, ...]:
        """The ranks that divide the experts with that of this pipeline: those of consecutive pipelines."""
        first = pipeline - pipeline % self._plan.options.expert
        return tuple(self.rank(first + k, device, part) for k in range(self._plan.options.expert))

    def _same_experts(self, pipeline: int, device: int, part: int) -> tuple[int, ...]:
        """The ranks that have the same experts as that of this pipeline."""
        expert = self._plan.options.expert
        return tuple(self.rank(c, device, part) for c in self._sizes[0][pipeline % expert :: expert])

    def _over(self, ranks: tuple[int, ...]) -> Replicas:
        zero = self._plan.options.zero if len(ranks) > 1 else 0
        return Replicas(self.transport, ranks, divided=zero > 0, scatters=zero > 1, gathers=zero > 2)

    def check_same(self, plan: Plan, *more: object) -> None:
        """Raise InputError if the ranks are not to run the same."""
        # How a plan was found is no part of what runs: ranks may have planned by themselves.
        runs = msgspec.structs.replace(
            plan.to_file(), planner="", lower_bound=0.0, solve_seconds=0.0, candidates=[], degree_search=None
        )
        fingerprints = self.transport.gather(zlib.crc32(msgspec.json.encode([runs, *more])))
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                raise InputError(f"Rank {rank} has another plan, seed or model than rank 0.")

    def earliest(self, moment: float) -> float:
        """The earliest of all ranks' moments, on one clock; this rank's, if hosts have clocks of their own."""
        moments = self.transport.gather(moment)
        return min(moments) if self.one_clock else moment

    @property
    def of_replica(self) -> int:
        """Ranks of one replica, which have one batch."""
        return self._plan.devices * self._plan.options.tensor * self._plan.options.context


def default_transport() -> Transport:
    """torch.distributed, initialised here if torchrun has started this process; alone without either."""
    import torch.distributed as dist

    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return Distributed() if dist.is_initialized() else Alone()


def default_device() -> torch.device:
    """A GPU where the ranks talk NCCL, else the CPU."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")
