"""Parameters that data-parallel ranks divide, and gather while they compute (ZeRO-3, FSDP).

Source: Rajbhandari et al., ZeRO, SC 2020, section 5.3 (P_os+g+p); Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.
"""

from __future__ import annotations

from torch import Tensor, nn

from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.streams import used_here


class DividedParameter:
    """A working parameter whose storage is empty unless it is gathered.

    Autograd keeps views of it from a forward to the backward.  They stay views of its storage, which is there again
    when the backward runs.

    Args:
        working: The parameter that computes, alone on its storage.
        master: This replica's rows of what the optimizer steps.
        shard: What is cast and gathered: the master itself, or the working parameter's rows of a master on the host.
        replicas: Those that divide it.
        ledger: Counts what is gathered.
    """

    def __init__(
        self, working: nn.Parameter, master: nn.Parameter, shard: Tensor, replicas: Replicas, ledger: Ledger
    ) -> None:
        self._working, self._master, self.shard = working, master, shard
        self._replicas, self._ledger = replicas, ledger
        self._nbytes = working.nbytes
        self._users = 0
        """Stages that have it gathered: two share a tied table."""
        working.untyped_storage().resize_(0)

    def refresh(self) -> None:
        """Give the shard the master's values."""
        if self.shard.data_ptr() != self._master.data_ptr():
            self.shard.copy_(self._master.detach(), non_blocking=True)

    def gather(self) -> None:
        """Make it whole, for one more stage.  The replicas gather the same parameters in the same order."""
        self._users += 1
        if self._users > 1:
            return
        # Autograd must not take the values for new ones: a parameter's `data` has a version of its own.
        whole = self._working.data
        whole.untyped_storage().resize_(self._nbytes)
        self._ledger.exclude([whole])
        self._ledger.count_gathered(self._nbytes)
        self._replicas.own(whole).copy_(self.shard)
        self._replicas.gather(whole)

    def free(self) -> None:
        """Let it go, if no other stage has it gathered."""
        self._users -= 1
        if self._users:
            return
        used_here(self._working)  # another stream than the one that computes has gathered it
        self._ledger.include([self._working])
        self._working.untyped_storage().resize_(0)
        self._ledger.count_gathered(-self._nbytes)

    def forget(self) -> None:
        """Let it go, whoever has it gathered."""
        if self._users:
            self._users = 1
            self.free()
