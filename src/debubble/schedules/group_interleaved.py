"""Group-interleaved: interleaved 1F1B with any group size and a split backward, in no more memory than 1F1B.

Source: Wan et al., PipeOffload, ICML 2025, section 4 (GIS).  Its B is our I.

The order of forwards and backwards is Megatron's (see `interleaved`), with groups of g micro-batches instead of p.  The
split backward takes half the time per stage, so device d needs only p - d + (v - 1) g forwards ahead, and delays each W
by d backwards, as in ZB-H1.  Groups smaller than p use less memory, but wait for their forwards to return.
"""

from __future__ import annotations

from debubble.ir import Schedule, StageCosts
from debubble.schedules.interleaved import in_groups, peak_in_groups
from debubble.schedules.registry import schedule


@schedule(
    "group-interleaved",
    paper="PipeOffload, ICML 2025",
    bubble="(p - 1)(f + i - min(f, i, w)) / v, for g = p",
    memory="(p + (v - 1) g) / v, for m a multiple of g",
    default_chunks=2,
    peak=lambda p, m, v: peak_in_groups(p, m, v, ahead=p),
)
def group_interleaved(
    *, devices: int, micro_batches: int, chunks: int = 2, group: int | None = None, costs: StageCosts | None = None
) -> Schedule:
    """Interleaved with groups of `group` micro-batches (default p) and W apart: (p + (v - 1) g) / v activations.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        group: Micro-batches of a group, g; p by default, and (p - 1) / 2 at least (the paper's are p / 2 to p).
        costs: Not read; the order is the same for any.

    Raises:
        InputError: The groups are so small that devices would deadlock.
    """
    ahead = range(devices, 0, -1)
    return in_groups("group-interleaved", micro_batches, chunks, ahead=ahead, group=group, delays=range(devices))
