"""Orders that are not in the schedule library, compared with torch's."""

from __future__ import annotations

import pytest

from debubble.imports.torch_orders import interleaved_zero_bubble
from debubble.ir import InputError

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize(("devices", "chunks", "rounds"), [(2, 1, 4), (3, 3, 2), (4, 2, 1), (4, 2, 4)])
def test_interleaved_zero_bubble_is_torchs(devices: int, chunks: int, rounds: int) -> None:
    torchs = object.__new__(torch_schedules.ScheduleInterleavedZeroBubble)
    torchs.n_local_stages, torchs.pp_group_size, torchs.microbatches_per_round = chunks, devices, devices
    torchs._n_microbatches = devices * rounds

    orders = interleaved_zero_bubble(devices=devices, micro_batches=devices * rounds, chunks=chunks).orders

    assert [[op.name for op in order] for order in orders] == [
        [str(action) for action in torchs._calculate_single_rank_operations(rank) if action is not None]
        for rank in range(devices)
    ]


def test_rounds_of_unlike_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="9 micro-batches cannot be divided evenly over 2 rounds"):
        interleaved_zero_bubble(devices=4, micro_batches=9, chunks=2)
