"""DualPipeV: DualPipe cut in half, two chunks per device in a V.

Source: Qi et al., "DualPipe could be better without the Dual", 2025, as adopted in DeepSeek's DualPipe repository.

Device d goes through eight phases.  In its main phase each forward of one chunk is paired with a backward of the other;
if computation and expert-parallel communication overlap, the two run as one.  Near the ends the backward is split, so
that weight gradients fill the bubbles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule(
    "dualpipe-v",
    paper="DualPipe without the Dual, 2025",
    bubble="(p - 1) f / 2, for f = i = w",
    memory="min(m, p + 1 / 2)",
    peak=lambda p, m, v: min(Fraction(m), p + Fraction(1, 2)),
    default_chunks=2,
    placement=Placement.v_shape,
)
def dualpipe_v(*, devices: int, micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """Two chunks in a V; every forward of one chunk is paired with a backward of the other.

    The rule requires m >= 2 p; for fewer micro-batches it is applied to 2 p, and the additional ones are omitted.
    """
    placement = Placement.v_shape(devices)
    rule_for = max(micro_batches, 2 * devices)
    orders = [
        [op for op in _PhaseList(device_stages).run(rule_for, devices, d) if op.micro_batch < micro_batches]
        for d, device_stages in enumerate(placement.stages_of)
    ]
    return Schedule.of("dualpipe-v", placement, micro_batches, orders)


class _PhaseList:
    """One device's eight phases.  Micro-batches are counted per kind and chunk; W operations are a queue."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.stages = stages
        self.next = {(kind, c): itertools.count() for kind in (Kind.F, Kind.B) for c in (0, 1)}
        self.pending_weights: list[Op] = []

    def run(self, micro_batches: int, devices: int, d: int) -> Iterator[Op]:
        after, upto = devices - d - 1, d + 1
        for _ in range(2 * after):
            yield self.forward(0)
        for _ in range(upto):
            yield self.forward(0)
            yield self.forward(1)
        for _ in range(after):
            yield self.backward(1, split=True)
            yield self.weight()
            yield self.forward(1)
        for _ in range(micro_batches - 2 * devices + upto):
            yield self.forward(0)
            yield self.backward(1)
            yield self.forward(1)
            yield self.backward(0)
        for _ in range(after):
            yield self.backward(1)
            yield self.forward(1)
            yield self.backward(0)
        # Backwards are split in the second half of this phase.
        for i in range(upto):
            yield self.backward(1, split=2 * i >= upto)
            yield self.backward(0, split=2 * i + 1 >= upto)
        for _ in range(after):
            yield self.weight()
            yield self.backward(0, split=True)
        while self.pending_weights:
            yield self.weight()

    def forward(self, chunk: int) -> Op:
        return Op(Kind.F, self.stages[chunk], next(self.next[Kind.F, chunk]))

    def backward(self, chunk: int, *, split: bool = False) -> Op:
        stage, j = self.stages[chunk], next(self.next[Kind.B, chunk])
        if split:
            self.pending_weights.append(Op(Kind.W, stage, j))
        return Op(Kind.I if split else Kind.B, stage, j)

    def weight(self) -> Op:
        return self.pending_weights.pop(0)
