"""Obscura's step model: the stages to adjust, the step time, and the time that swapping adds.

Source: Huang et al., Obscura, USENIX ATC 2025, equations (1)-(3), (5) and section 8.

The paper's symbols: p stages, m micro_batches, k = adjusted - 1, mu_s = warm_ups[s], f, b = 2f and r the times of
forward, backward and recomputation, a^adj the activation block that a stage stores per micro-batch, W_s static memory,
G the limit.  The model ranks configurations; the final choice is by simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.ir import StageCosts
from debubble.papers.obscura.schedule import first_swapped
from debubble.planners.partitioning.fixed_partition import Stages
from debubble.planners.partitioning.pareto import StageRecomputation


def identify(stages: Stages, choices: Sequence[StageRecomputation]) -> int:
    """K + 1: the number of stages up to the last that exceeds its limit under 1F1B with these choices.

    With `stages.named("cmb")` this is CMB-Identifying: stages that fit by recomputing cheap operators are not adjusted.
    """
    devices = len(choices)
    alive = [min(devices - s, stages.problem.micro_batches) for s in range(devices)]
    over = [s for s, c in enumerate(choices) if alive[s] * c.retained + c.workspace > stages.budget(s)]
    return over[-1] + 1 if over else 0


def warm_ups(devices: int, micro_batches: int, *, adjusted: int, migrated: int) -> list[int]:
    """mu_s: the forwards of each stage before its first backward, including x = `migrated` on adjusted stages."""
    return [min(micro_batches, devices - s + (migrated if s < adjusted else 0)) for s in range(devices)]


@dataclass(frozen=True)
class Swapping:
    """Times that swapping adds to one stage, per phase."""

    warm_up: float = 0.0
    steady: float = 0.0
    """Sum over all periods of the steady phase."""
    ending: float = 0.0


def step_time(
    costs: StageCosts,
    recompute: Sequence[float],
    *,
    micro_batches: int,
    warm_ups: Sequence[int],
    swapping: Sequence[Swapping] | None = None,
) -> float:
    """Lower bound of the step time if stage s runs mu_s = `warm_ups[s]` forwards before its first backward.

    For equal stages it is exactly equation (3); stages may have different times, which replaces equation (5).  A long
    warm-up overlaps the wait for the first gradient: the term (k - s)(2f + r) of equation (2).  `recompute` is r per
    stage, `swapping` the time that swapping adds to each.
    """
    p = costs.stages
    scales = costs.micro_batch_scale or (1,) * micro_batches
    first, last, total = float(scales[0]), float(scales[-1]), float(sum(scales))
    forward = [float(f) for f in costs.forward]
    backward = [float(costs.backward(s)) + recompute[s] for s in range(p)]
    hop = [float(c) for c in costs.communication[: p - 1]]
    longest = 0.0
    for s in range(p):
        added = swapping[s] if swapping else Swapping()
        before, later = float(sum(scales[: warm_ups[s]])), float(sum(scales[warm_ups[s] :]))
        arrival = first * (sum(forward[:s]) + sum(hop[:s]))
        gradient = first * (sum(forward) + sum(backward[s + 1 :]) + sum(hop) + sum(hop[s:]))
        start = max(gradient, arrival + before * forward[s] + added.warm_up)
        drain = last * (sum(backward[:s]) + sum(hop[:s]))
        longest = max(longest, start + total * backward[s] + later * forward[s] + added.steady + added.ending + drain)
    return longest


def swapping_cost(
    *, blocks: int, warm_up: int, periods: int, transfer: float, pace: float, forward: float, backward: float
) -> Swapping:
    """T_s^C of equation (2): the times that swapping lambda = `blocks` of mu = `warm_up` blocks adds.

    `transfer` = a^adj beta / B; `pace`: seconds per transfer while all devices that share a link swap; `backward` =
    2f + r.  The equation is max(lambda (transfer - f) - (k - s)(2f + r), 0) + lambda (transfer - 2f - r) + eps; its
    second term must not be negative, and eps in [0, 3f + r] depends on the swapping design.  In ours the blocks that
    stay give transfers a head start of several forwards and backwards; with too few, every forward or period waits.
    """
    if not blocks:
        return Swapping()
    lead = first_swapped(warm_up, blocks)
    spare = warm_up - blocks - lead
    period = forward + backward
    evicted = max(transfer - (spare - 1) * period, 0.0)
    wait = min(evicted + transfer - lead * period, transfer - forward - (lead - 1) * period)
    eviction, loading = max(pace, (forward + transfer) / spare), max(pace, (backward + transfer) / lead)
    return Swapping(
        warm_up=max(blocks * (eviction - forward) - max(spare - 2, 0) * forward, 0.0),
        steady=periods * max(wait, pace - period, 0.0),
        ending=max(blocks * (loading - backward) - max(lead - 2, 0) * backward, 0.0),
    )
