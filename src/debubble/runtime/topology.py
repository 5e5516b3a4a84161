"""The ranks of a run: replica, device and part of each, their groups, and what they must agree on before they run."""

from __future__ import annotations

import math
import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor

from debubble.ir import InputError, Kind, Lane, Program
from debubble.ir.ops import UNSHARDS
from debubble.plans import Plan
from debubble.runtime.assembly import DeviceGroups, tied_devices
from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.distributed.expert_parallel import ExpertGroup
from debubble.runtime.distributed.gradient_norm import NormRelay, PartialSums, finish_order, relay_channels
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.distributed.transport import DistributedTransport, SingleProcessTransport, Transport
from debubble.runtime.execution.peer_offload import message_channels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

REPLICA_KINDS = frozenset((Kind.G, Kind.D, Kind.S, Kind.P, *UNSHARDS))
"""Kinds that sum or gather over replicas."""


class Ranks:
    """The ranks of a plan as one of them sees them: rank = (pipeline x devices + device) x tensor + part.

    Pipelines are numbered replica x context + slice.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan, self.transport = plan, transport
        options = plan.options
        at, self.part = divmod(transport.rank, options.tensor)
        pipeline, self.device = divmod(at, plan.devices)
        self.replica, self.slice = divmod(pipeline, options.context)
        """The batch that this rank has, and the slice of its sequences."""
        self.one_clock = True
        """True if all ranks are on one host."""
        self._finish_order: tuple[int, ...] = ()
        copies, on_each = options.data * options.context, plan.devices * options.tensor
        self._replicas, self._pipelines, self._parts = _groups((copies, plan.devices, options.tensor))
        self._same_slice, self._slices, _ = _groups((options.data, options.context, on_each))
        # Consecutive pipelines divide the experts.
        self._same_experts, self._experts, _ = _groups((copies // options.expert, options.expert, on_each))

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """This pipeline's ranks that are this part of their device."""
        return self._own(self._pipelines)

    @property
    def rank_of(self) -> Mapping[int, int]:
        """Device of this pipeline -> the rank that is this part of it."""
        return dict(enumerate(self.pipeline))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that are this part of this device in every pipeline: they share its parameters."""
        return self._own(self._replicas)

    @cached_property
    def groups(self) -> DeviceGroups:
        """The groups that this rank's stages know."""
        experts = ExpertGroup(self.transport, self._own(self._experts))
        same_experts = self._over(self._own(self._same_experts))
        return DeviceGroups(self.over_replicas, self.tensor, self.context, experts, same_experts)

    @cached_property
    def context(self) -> ContextGroup:
        """The ranks that divide this one's sequences among them."""
        return ContextGroup(self.transport, self._own(self._slices))

    @cached_property
    def over_replicas(self) -> Replicas:
        """The replicas of this device, and what they divide."""
        return self._over(self.replicas)

    @cached_property
    def tensor(self) -> TensorGroup:
        """The ranks that divide this device's stages among them."""
        ranks = self._own(self._parts)
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
        return tuple(sorted(self.pipeline[d] for d in tied_devices(self._plan)))

    def first_per_device(self, values: Sequence[T]) -> list[T]:
        """Keep, of one value for every rank, those of replica 0's tensor rank 0 of each pipeline device."""
        return [values[rank] for rank in self._pipelines[0]]

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
        relays = [[pipeline[d] for d in self._finish_order] for pipeline in self._pipelines]
        self.transport.open([channel for ranks in relays for channel in relay_channels(ranks)], [])
        return NormRelay(self.transport, [self.pipeline[d] for d in self._finish_order])

    def open(self, program: Program, *, seed: int, own_model: bool) -> None:
        """Open everybody's channels and groups.  Raises InputError if the ranks are not to run the same."""
        self.check_same(self._plan, seed, own_model)
        self.one_clock = len(set(self.transport.gather(socket.gethostname()))) == 1
        self._finish_order = finish_order(program)
        reducing = {i.lane: None for i in program.instructions if i.op.kind in REPLICA_KINDS}
        channels = [(ranks[a], ranks[b], what) for ranks in self._pipelines for a, b, what in message_channels(program)]
        working = (*self._pipelines, *self._parts, *self._slices, *self._same_slice, *self._experts)
        sharing = (*self._replicas, *self._same_experts)
        sharing_table = tied_devices(self._plan)
        tied = [tuple(sorted(pipeline[d] for d in sharing_table)) for pipeline in self._pipelines]
        self.transport.open(
            channels,
            [(ranks, Lane.COMPUTE) for ranks in (*working, *sharing, *tied)]
            + [(ranks, lane) for lane in reducing for ranks in sharing],
        )

    def _own(self, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The one of these groups that this rank is in."""
        return next(group for group in groups if self.transport.rank in group)

    def _over(self, ranks: tuple[int, ...]) -> Replicas:
        zero = self._plan.options.zero if len(ranks) > 1 else 0
        return Replicas(self.transport, ranks, divided=zero > 0, scatters=zero > 1, gathers=zero > 2)

    def check_same(self, plan: Plan, *more: object) -> None:
        """Raise InputError if the ranks are not to run the same."""
        # How a plan was found, and what its model is called, is no part of what runs: ranks may have planned alone.
        runs = msgspec.structs.replace(
            plan.to_file(), planner="", lower_bound=0.0, solve_seconds=0.0, candidates=[], degree_search=None,
            model_name=None,
        )  # fmt: skip
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


def _groups(shape: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """The groups of ranks that differ in one dimension alone, for each one of a grid of all in row-major order."""
    grid = torch.arange(math.prod(shape)).view(shape)
    return [[tuple(line) for line in grid.movedim(dim, -1).flatten(0, -2).tolist()] for dim in range(len(shape))]


def default_transport() -> Transport:
    """torch.distributed, initialised here if torchrun has started this process; alone without either."""
    import torch.distributed as dist

    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return DistributedTransport() if dist.is_initialized() else SingleProcessTransport()


def default_device() -> torch.device:
    """A GPU where the ranks talk NCCL, else the CPU."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")
