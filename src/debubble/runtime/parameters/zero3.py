"""Parameters that data-parallel ranks shard, and gather to compute (ZeRO-3, FSDP).

Source: Rajbhandari et al., ZeRO, SC 2020, section 5.3 (P_os+g+p); Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.
"""

from __future__ import annotations

from torch import Tensor, nn

from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.streams import used_here


class ShardedParameter:
    """A working parameter whose storage is empty unless it is gathered.

    Views that autograd saves in a forward remain valid, as their storage is filled again before the backward.

    Args:
        working: The parameter that computes, alone on its storage.
        master: This replica's rows of the master.
        shard: The rows to gather: the master itself, or a copy on the device of a master on the host.
        replicas: The ranks that shard it.
        ledger: Counts gathered bytes.
    """

    def __init__(
        self, working: nn.Parameter, master: nn.Parameter, shard: Tensor, replicas: Replicas, ledger: Ledger
    ) -> None:
        self._working, self._master, self.shard = working, master, shard
        self._replicas, self._ledger = replicas, ledger
        self._nbytes = working.nbytes
        self._users = 0
        """Number of stages that have unsharded it; a tied table can have two."""
        working.untyped_storage().resize_(0)

    def refresh(self) -> None:
        """Copy the master to the shard."""
        if self.shard.data_ptr() != self._master.data_ptr():
            self.shard.copy_(self._master.detach(), non_blocking=True)

    def unshard(self) -> None:
        """Gather it for one more stage.  All replicas unshard the same parameters in the same order."""
        self._users += 1
        if self._users > 1:
            return
        # `data` has a version of its own, so autograd does not see a change in place.
        full = self._working.data
        full.untyped_storage().resize_(self._nbytes)
        self._ledger.exclude([full])
        self._ledger.count_gathered(self._nbytes)
        self._replicas.local_rows(full).copy_(self.shard)
        self._replicas.gather(full)

    def reshard(self) -> None:
        """Free it, unless another stage has unsharded it."""
        self._users -= 1
        if self._users:
            return
        used_here(self._working)  # it was gathered on another stream
        self._ledger.include([self._working])
        self._working.untyped_storage().resize_(0)
        self._ledger.count_gathered(-self._nbytes)

    def forget(self) -> None:
        """Free it for all stages."""
        if self._users:
            self._users = 1
            self.reshard()
