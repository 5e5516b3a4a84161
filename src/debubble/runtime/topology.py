"""The ranks of a run: their coordinates, their groups, and the checks that they run the same plan."""

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
"""Operation kinds with collectives over replicas."""


class Ranks:
    """The ranks of a plan, as seen by one of them: rank = (pipeline x devices + device) x tensor + tensor_rank.

    Pipelines are numbered replica x context + slice.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan, self.transport = plan, transport
        options = plan.options
        pipeline_rank, self.tensor_rank = divmod(transport.rank, options.tensor)
        pipeline, self.device = divmod(pipeline_rank, plan.devices)
        self.replica, self.slice = divmod(pipeline, options.context)
        """The replica that determines this rank's batch, and its context-parallel slice of the sequences."""
        self.one_clock = True
        """True if all ranks are on one host, and so share a clock."""
        self._finish_order: tuple[int, ...] = ()
        pipelines, pipeline_ranks = options.data * options.context, plan.devices * options.tensor
        self._replicas, self._pipelines, self._tensor = _groups((pipelines, plan.devices, options.tensor))
        self._same_slice, self._slices, _ = _groups((options.data, options.context, pipeline_ranks))
        # Consecutive pipelines divide the experts.
        self._same_experts, self._experts, _ = _groups((pipelines // options.expert, options.expert, pipeline_ranks))

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """The ranks of this pipeline with this tensor rank, by device."""
        return self._local_group(self._pipelines)

    @property
    def rank_of(self) -> Mapping[int, int]:
        """Device of this pipeline -> its rank with this tensor rank."""
        return dict(enumerate(self.pipeline))

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The ranks with the same device and tensor rank in every pipeline: they have the same parameters."""
        return self._local_group(self._replicas)

    @cached_property
    def groups(self) -> DeviceGroups:
        """The groups that this rank's stages use."""
        experts = ExpertGroup(self.transport, self._local_group(self._experts))
        same_experts = self._replica_group(self._local_group(self._same_experts))
        return DeviceGroups(self.replica_group, self.tensor, self.context, experts, same_experts)

    @cached_property
    def context(self) -> ContextGroup:
        """The ranks that shard the same sequences."""
        return ContextGroup(self.transport, self._local_group(self._slices))

    @cached_property
    def replica_group(self) -> Replicas:
        """The replicas of this device, and what they shard (ZeRO)."""
        return self._replica_group(self.replicas)

    @cached_property
    def tensor(self) -> TensorGroup:
        """The ranks that shard this device's stages."""
        ranks = self._local_group(self._tensor)
        return TensorGroup(self.transport, ranks, self.mesh["tp"] if len(ranks) > 1 and self.mesh else None)

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """Torch's device mesh: dp (replicas) x cp (slices, if any) x pp (devices) x tp (tensor ranks).

        None without torch.distributed.
        """
        options = self._plan.options
        slices = {"cp": options.context} if options.context > 1 else {}
        return self.transport.mesh({"dp": options.data, **slices, "pp": self._plan.devices, "tp": options.tensor})

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """The two ranks of this pipeline with a copy of the tied table; empty if there is one copy."""
        return tuple(sorted(self.pipeline[d] for d in tied_devices(self._plan)))

    def first_per_device(self, values: Sequence[T]) -> list[T]:
        """Select, from one value per rank, that of each pipeline device's tensor rank 0 in the first pipeline."""
        return [values[rank] for rank in self._pipelines[0]]

    @property
    def shares_table(self) -> bool:
        """True if another rank has a copy of this rank's tied table."""
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
        """This device's sums over its tensor ranks and replicas; every gradient's square counts on one rank only."""
        total = torch.tensor([squares, loss if self.tensor_rank == 0 else 0.0], dtype=torch.float64, device=on)
        self.sum_over_replicas(total)
        self.tensor.sum(total)
        return PartialSums(*total.tolist())

    def total_sums(self, local: PartialSums, *, on: torch.device) -> PartialSums:
        """The sums of the pipeline's devices, added in the order of the relay; all its ranks wait for them."""
        slots = torch.zeros(self._plan.devices, 3, dtype=torch.float64, device=on)
        slots[self.device] = local.to_tensor()
        self.sum_over_pipeline(slots)
        return PartialSums.sum(PartialSums.from_tensor(slots[device]) for device in self._finish_order)

    def open_relay(self) -> NormRelay:
        """Open the relay of partial sums along every pipeline, and return this one's.  All ranks call it."""
        relays = [[pipeline[d] for d in self._finish_order] for pipeline in self._pipelines]
        self.transport.open([channel for ranks in relays for channel in relay_channels(ranks)], [])
        return NormRelay(self.transport, [self.pipeline[d] for d in self._finish_order])

    def open(self, program: Program, *, seed: int, own_model: bool) -> None:
        """Open all channels and process groups.  Raises InputError if ranks have different plans, seeds or models."""
        self.check_same(self._plan, seed, own_model)
        self.one_clock = len(set(self.transport.gather(socket.gethostname()))) == 1
        self._finish_order = finish_order(program)
        reducing = {i.lane: None for i in program.instructions if i.op.kind in REPLICA_KINDS}
        channels = [(ranks[a], ranks[b], kind) for ranks in self._pipelines for a, b, kind in message_channels(program)]
        working = (*self._pipelines, *self._tensor, *self._slices, *self._same_slice, *self._experts)
        sharing = (*self._replicas, *self._same_experts)
        sharing_table = tied_devices(self._plan)
        tied = [tuple(sorted(pipeline[d] for d in sharing_table)) for pipeline in self._pipelines]
        self.transport.open(
            channels,
            [(ranks, Lane.COMPUTE) for ranks in (*working, *sharing, *tied)]
            + [(ranks, lane) for lane in reducing for ranks in sharing],
        )

    def _local_group(self, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The group that contains this rank."""
        return next(group for group in groups if self.transport.rank in group)

    def _replica_group(self, ranks: tuple[int, ...]) -> Replicas:
        zero = self._plan.options.zero if len(ranks) > 1 else 0
        return Replicas(
            self.transport, ranks, shards_states=zero > 0, shards_gradients=zero > 1, shards_parameters=zero > 2
        )

    def check_same(self, plan: Plan, *more: object) -> None:
        """Raise InputError if ranks have different plans, seeds or models."""
        # Ranks may have planned separately: how a plan was found, and its model's name, may differ.
        executed = msgspec.structs.replace(
            plan.to_file(), planner="", lower_bound=0.0, solve_seconds=0.0, candidates=[], degree_search=None,
            model_name=None,
        )  # fmt: skip
        fingerprints = self.transport.gather(zlib.crc32(msgspec.json.encode([executed, *more])))
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                raise InputError(f"Rank {rank} has another plan, seed or model than rank 0.")

    def earliest(self, moment: float) -> float:
        """The earliest of all ranks' times if they share a clock, else this rank's."""
        moments = self.transport.gather(moment)
        return min(moments) if self.one_clock else moment

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of one replica, which have the same batch."""
        return self._plan.devices * self._plan.options.tensor * self._plan.options.context


def _groups(shape: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Per dimension of a row-major grid of all ranks, the groups of ranks that differ in that dimension only."""
    grid = torch.arange(math.prod(shape)).view(shape)
    return [[tuple(line) for line in grid.movedim(dim, -1).flatten(0, -2).tolist()] for dim in range(len(shape))]


def default_transport() -> Transport:
    """torch.distributed, initialised here under torchrun; a single process otherwise."""
    import torch.distributed as dist

    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return DistributedTransport() if dist.is_initialized() else SingleProcessTransport()


def default_device() -> torch.device:
    """This rank's GPU with NCCL, else the CPU."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")
