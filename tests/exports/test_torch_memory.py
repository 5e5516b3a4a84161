"""Memory that torch's pipelining keeps between two steps matches what is counted for it."""

import pytest

torch = pytest.importorskip("torch")

from debubble.costs.units import Units  # noqa: E402
from tests.support import gloo_ranks, torch_pipeline  # noqa: E402

RANKS, MICRO_BATCHES = 3, 6
MESSAGE = 4 * torch_pipeline.ROWS * torch_pipeline.WIDTH
"""Bytes in fp32."""


@pytest.mark.slow
def test_torchs_buffers_are_those_that_are_counted() -> None:
    """Its schedule returns the outputs of all micro-batches; the last one is the last stage's activation."""
    units = Units(units=(), receive_buffers=MICRO_BATCHES * MESSAGE, kept_outputs=(MICRO_BATCHES - 1) * MESSAGE)

    answers = gloo_ranks.spawn(RANKS, torch_pipeline.bytes_between_steps, MICRO_BATCHES)

    actual = [torch.load(answers / f"rank{rank}.pt") for rank in range(RANKS)]
    counted = [units.buffers((rank,), RANKS) for rank in range(RANKS)]
    assert actual == [*counted[:-1], counted[-1] + MESSAGE]
