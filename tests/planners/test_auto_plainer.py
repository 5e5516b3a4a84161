"""What a fastest plan recomputes and offloads to no use is left out."""

from __future__ import annotations

import debubble as db
from debubble.ir import Kind


def test_a_plan_with_room_neither_offloads_nor_recomputes() -> None:
    plan = db.plan("llama-tiny", "2xCPU", micro_batches=4, sequence_length=128, dtype="fp32", effort=1)

    assert not any(op.kind in (Kind.O, Kind.R) for op in plan.schedule.operations)
    assert {unit.strategy for stage in plan.partition for unit in stage} == {"none"}
