"""Which rank is which device of which replica, and what the ranks must agree on before they run."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping
from functools import cached_property
from time import perf_counter

import msgspec
import torch
from torch import Tensor

from debubble.ir import InputError, Plan, Program
from debubble.ir.plan_file import encode
from debubble.runtime.assembly import tied_devices
from debubble.runtime.batch import Rows
from debubble.runtime.guests import channels
from debubble.runtime.relay import Relay, turns
from debubble.runtime.relay import channels as relay_channels
from debubble.runtime.replicas import Replicas
from debubble.runtime.tally import Tally
from debubble.runtime.transport import Alone, Distributed, Transport


class Ranks:
    """The ranks of a plan as one of them sees them: rank = replica x devices + device."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan, self.transport = plan, transport
        self.replica, self.device = divmod(transport.rank, plan.devices)
        self._one_clock = True
        self._turns: tuple[int, ...] = ()

    @cached_property
    def rank_of(self) -> Mapping[int, int]:
        """Device of this replica -> rank."""
        return {d: self.replica * self._plan.devices + d for d in range(self._plan.devices)}

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """This replica's ranks."""
        return tuple(self.rank_of.values())

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The ranks that are this device in every replica."""
        return tuple(replica * self._plan.devices + self.device for replica in range(self._plan.options.data))

    @cached_property
    def over_replicas(self) -> Replicas:
        """What these do together."""
        return Replicas(self.transport, self.replicas, self._plan.options.zero > 0 and len(self.replicas) > 1)

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """This replica's ranks that each hold a copy of the tied table, if there are two."""
        return tuple(sorted(self.rank_of[d] for d in tied_devices(self._plan)))

    @property
    def shares_table(self) -> bool:
        """Whether another rank has a copy of this one's tied table."""
        return self.transport.rank in self.tied

    def sum_over_replicas(self, tensor: Tensor) -> None:
        """In place."""
        self.transport.all_reduce(tensor, self.replicas)

    def sum_over_pipeline(self, tensor: Tensor) -> None:
        """In place."""
        self.transport.all_reduce(tensor, self.pipeline)

    def sum_over_tied(self, tensor: Tensor) -> None:
        """In place."""
        self.transport.all_reduce(tensor, self.tied)

    def tally(self, squares: float, loss: float, *, on: torch.device) -> Tally:
        """This device's, over all replicas: whole gradients are the same on all of them and count once."""
        counts = self.over_replicas.divided or self.replica == 0
        numbers = torch.tensor([squares if counts else 0.0, loss], dtype=torch.float64, device=on)
        self.sum_over_replicas(numbers)
        return Tally(*numbers.tolist())

    def whole(self, own: Tally, *, on: torch.device) -> Tally:
        """That of the whole pipeline, added in the order of the relay's turns; all its ranks wait for it."""
        slots = torch.zeros(self._plan.devices, 2, dtype=torch.float64, device=on)
        slots[self.device] = torch.tensor([own.squares, own.loss], dtype=torch.float64)
        self.sum_over_pipeline(slots)
        told = [Tally(*numbers) for numbers in slots.tolist()]
        return Tally.of(told[device] for device in self._turns)

    def open_relay(self) -> Relay:
        """What hands tallies along this pipeline.  All ranks call it."""
        devices = self._plan.devices
        firsts = [replica * devices for replica in range(self._plan.options.data)]
        self.transport.open(
            [channel for first in firsts for channel in relay_channels([first + d for d in self._turns])], []
        )
        return Relay(self.transport, [self.rank_of[d] for d in self._turns])

    def open(self, program: Program, *, seed: int, own_model: bool) -> None:
        """Open everybody's channels and groups.  Raises InputError if the ranks are not to run the same."""
        self.check_same(self._plan, seed, own_model)
        self._one_clock = len(set(self.transport.gather(socket.gethostname()))) == 1
        self._turns = turns(program)
        devices = self._plan.devices
        firsts = [replica * devices for replica in range(self._plan.options.data)]
        groups = [tuple(range(first, first + devices)) for first in firsts]
        groups += [tuple(first + d for first in firsts) for d in range(devices)]
        groups += [tuple(sorted(first + d for d in tied_devices(self._plan))) for first in firsts]
        self.transport.open([(a + f, b + f, what) for f in firsts for a, b, what in channels(program)], groups)

    def check_same(self, plan: Plan, *more: object) -> None:
        """Raise InputError if the ranks are not to run the same."""
        # How a plan was found is no part of what runs: ranks may have planned by themselves.
        runs = msgspec.structs.replace(encode(plan), planner="", lower_bound=0.0, solve_seconds=0.0, candidates=[])
        told = self.transport.gather(zlib.crc32(msgspec.json.encode([runs, *more])))
        for rank, fingerprint in enumerate(told):
            if fingerprint != told[0]:
                raise InputError(f"Rank {rank} has another plan, seed or model than rank 0.")

    def count(self, rows: Rows) -> int:
        """Targets over all replicas, told by this device's alone: no rank of the pipeline waits for another."""
        total = torch.tensor(rows.counted, device=rows.tokens.device)
        self.sum_over_replicas(total)
        if not total:
            raise InputError("The batch has no target to learn from.")
        return int(total)

    def agree(self, rows: Rows) -> tuple[int, float]:
        """Targets over all replicas, and the moment at which all ranks were ready, on this rank's clock.

        Raises InputError if the ranks of a replica have different batches, or the replicas different shapes.
        """
        told = self.transport.gather((tuple(rows.tokens.shape), rows.counted, perf_counter()))
        devices = self._plan.devices
        for rank, (shape, counted, _) in enumerate(told):
            first = rank // devices * devices
            if shape != told[0][0] or counted != told[first][1]:
                raise InputError(
                    f"Rank {rank} has a batch of shape {list(shape)} with {counted} targets, but rank {first} one of"
                    f" {list(told[first][0])} with {told[first][1]}."
                )
        total: int = sum(counted for rank, (_, counted, _) in enumerate(told) if rank % devices == 0)
        if not total:
            raise InputError("The batch has no target to learn from.")
        # Hosts have clocks of their own: there, the moment of the answer stands for it.
        return total, max(at for _, _, at in told) if self._one_clock else perf_counter()


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
