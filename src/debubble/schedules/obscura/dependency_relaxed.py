"""Dependency relaxation: the strawman, its adjusted stages freed from the pace of their neighbours.

Source: Huang et al., Obscura, USENIX ATC 2025, section 5.2 and the middle of figure 9.

p = devices, m = micro_batches, k = adjusted_stages - 1.  The warm-up of stage s <= k is the strawman's,
mu_s = 3(p - s) - 2 forwards; the remaining forwards move left and alternate with the backwards from the first one on.
"""

from __future__ import annotations

from debubble.ir import Schedule, StageCosts
from debubble.schedules.obscura.strawman import adjusted_pipeline, identify
from debubble.schedules.one_f_one_b import alternate
from debubble.schedules.registry import schedule


@schedule(
    "dependency-relaxed",
    paper="Obscura, ATC 2025",
    bubble="(p - 1)(f + b), and max(r, m r - 3(p - k - 1) f) + k r of recomputation stays visible",
    memory="min(m, 3 p - 2)",
)
def dependency_relaxed(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    adjusted_stages: int | None = None,
) -> Schedule:
    """The strawman with its remaining forwards and backwards in turn, so that bubbles hide any recomputation.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Their memory limit chooses the adjusted stages; nothing else is read.
        adjusted_stages: First stages that are adjusted; by default those that exceed the costs' memory limit.
    """
    adjusted = identify(adjusted_stages, devices=devices, micro_batches=micro_batches, costs=costs)
    warm_ups = [3 * (devices - s) - 2 if s < adjusted else devices - s for s in range(devices)]
    orders = [alternate(s, micro_batches, warm_up=warm_up) for s, warm_up in enumerate(warm_ups)]
    return adjusted_pipeline("dependency-relaxed", orders, micro_batches=micro_batches, adjusted=adjusted)
