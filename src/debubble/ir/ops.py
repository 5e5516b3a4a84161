"""The operations of a training step.

An operation is a kind, a stage and a micro-batch, written in torch's letters: `2F5` is the forward of micro-batch 5 on
stage 2.  Kinds that do not belong to a single micro-batch (the optimizer step and its transfers) carry the micro-batch
that they follow, or, for `P`, the one that they precede.
"""

from __future__ import annotations

import re
from enum import Enum, StrEnum
from typing import NamedTuple

from debubble.errors import InputError


class Lane(StrEnum):
    """A resource of a device that executes one operation at a time, such as its compute stream or a copy engine."""

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    D2H = "d2h"
    H2D = "h2d"
    HOST = "host"
    REDUCE = "reduce"
    """Data-parallel collectives: gradient reductions and parameter gathers."""


class Kind(Enum):
    """The kinds of operations; the value is the letter in names and files."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward."""
    I = "I"  # noqa: E741 - torch's letter
    """Backward for inputs only."""
    W = "W"
    """Backward for weights only."""
    R = "R"
    """Recompute what the forward dropped."""
    O = "O"  # noqa: E741 - the field's letter
    """Offload the saved activation to the host, or to a peer device."""
    L = "L"
    """Reload the activation that O offloaded."""
    G = "G"
    """Reduce the stage's gradients over the data-parallel ranks, up to and including this micro-batch."""
    D = "D"
    """Offload the stage's gradients to the host."""
    S = "S"
    """Optimizer step of the stage; on the host if its gradients were offloaded, else on the device."""
    P = "P"
    """Load the stage's updated parameters from the host, before this micro-batch."""
    SEND_F = "SEND_F"
    """Send the forward's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the forward's input from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the next stage."""
    UNSHARD_F = "UNSHARD_F"
    """Gather the stage's parameters from the data-parallel ranks, before this micro-batch's forward."""
    UNSHARD_R = "UNSHARD_R"
    """Gather them before its recomputation."""
    UNSHARD_B = "UNSHARD_B"
    """Gather them before its backward."""
    RESHARD_F = "RESHARD_F"
    """Free the other ranks' shards of the stage's parameters, after this micro-batch's forward."""
    RESHARD_R = "RESHARD_R"
    """Free them after its recomputation."""
    RESHARD_B = "RESHARD_B"
    """Free them after its backward."""

    # Members are singletons, so identity is enough; Enum's hash is a Python call, slow for a million operations.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.value


KINDS = tuple(Kind)
CODE = {kind: code for code, kind in enumerate(KINDS)}
"""Kind -> its code in arrays, the index in KINDS."""

BACKWARDS = (Kind.B, Kind.I)
"""The kinds that consume the gradient from the next stage."""

HOST_STEP = (Kind.P, Kind.D, Kind.S)
"""The kinds of an optimizer step on the host: parameter load, gradient offload, and the step."""

COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
"""The kinds that always run on the compute lane; S does unless it runs on the host."""

TRANSFERS = (Kind.O, Kind.L, Kind.D, Kind.P)
"""The kinds that transfer bytes over a device's host link, or activations to a peer."""

UNSHARDS = (Kind.UNSHARD_F, Kind.UNSHARD_R, Kind.UNSHARD_B)
RESHARDS = (Kind.RESHARD_F, Kind.RESHARD_R, Kind.RESHARD_B)

SCHEDULED = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L, Kind.G, Kind.D, Kind.S, Kind.P)
"""The kinds that a Schedule may contain; lowering adds messages, and gathers of sharded parameters."""


class Op(NamedTuple):
    """One operation: `Op(Kind.F, 2, 5)` is `2F5`."""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def name(self) -> str:
        """The name in files and pictures, such as `2F5`."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(name: str) -> Op:
        """Parse an operation's name.

        Args:
            name: Such as `2F5`.

        Returns:
            The operation, here `Op(Kind.F, 2, 5)`.

        Raises:
            InputError: If the text is not such a name.
        """
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise InputError(f"'{name}' is not an operation: write stage, kind and micro-batch, such as 2F5.")
        return Op(_KINDS[match[2]], int(match[1]), int(match[3]))


_KINDS = {kind.value: kind for kind in Kind}
_NAME = re.compile(rf"([0-9]{{1,9}})({'|'.join(_KINDS)})([0-9]{{1,9}})")
