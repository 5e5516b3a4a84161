"""Obscura: the dependency-relaxed pipeline without needless migration, its activations swapped.

Source: Huang et al., Obscura, USENIX ATC 2025, sections 5.3 and 6.1, the bottom of figure 9, figure 10.

p = devices, m = micro_batches, k = adjusted_stages - 1, lambda_k = swapped_blocks, beta = swapped_fraction.  Stage
s <= k runs mu_s = 3(p - k) - 2 + (k - s) forwards before its first backward: those of 1F1B and x = 2(p - k - 1)
migrated ones.  The paper says to "align the number of backward bubbles with those in stage k", which leaves mu_s open;
with the same mu_s everywhere neighbouring adjusted stages take turns and the step takes twice as long, so each stage
has one more than the next.  Likewise lambda_s = lambda_k + (k - s), as the paper has it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Literal, get_args

from debubble.ir import InputError, Number, Schedule, StageCosts
from debubble.schedules.obscura.strawman import adjusted_pipeline, identify
from debubble.schedules.obscura.swapping import swap
from debubble.schedules.one_f_one_b import alternate
from debubble.schedules.registry import schedule
from debubble.simulator import simulate

Destination = Literal["host", "peer"]


@schedule(
    "obscura",
    paper="Obscura, ATC 2025",
    bubble="(p - 1)(f + b), and max(r, m r - 3(p - k - 1) f) + k r of recomputation stays visible",
    memory="min(m, 3 p - 2 k - 2) - beta lambda_0",
)
def obscura(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    adjusted_stages: int | None = None,
    swapped_blocks: int = 0,
    swapped_fraction: Number = 1,
    destination: Destination = "host",
) -> Schedule:
    """The adjusted stages recompute, alternate, and run 2(p - k - 1) forwards more before the first backward.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Their memory limit chooses the adjusted stages; nothing else is read.
        adjusted_stages: First stages that are adjusted; by default those that exceed the costs' memory limit.
        swapped_blocks: Activations of the last adjusted stage's warm-up that leave the device, lambda_k; 0: no
            swapping.
        swapped_fraction: Share of each that leaves, beta.
        destination: `host`, or `peer`: the paired device p - 1 - s, as in BPipe.
    """
    adjusted = identify(adjusted_stages, devices=devices, micro_batches=micro_batches, costs=costs)
    return migrated_pipeline(
        "obscura",
        devices=devices,
        micro_batches=micro_batches,
        adjusted=adjusted,
        migrated_forwards=most_migrated(devices, adjusted),
        swapped_blocks=swapped_blocks,
        swapped_fraction=swapped_fraction,
        destination=destination,
    )


@schedule(
    "obscura-minimal",
    paper="Obscura, ATC 2025 (the variant is ours)",
    bubble="as obscura",
    memory="min(m, p + x) - beta lambda_0, x <= 2(p - k - 1)",
)
def obscura_minimal(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    adjusted_stages: int | None = None,
    migrated_forwards: int | None = None,
    swapped_blocks: int = 0,
    swapped_fraction: Number = 1,
    destination: Destination = "host",
) -> Schedule:
    """Obscura with no more migrated forwards than its recomputation needs, which saves memory when that is short.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Their memory limit chooses the adjusted stages, their times x.
        adjusted_stages: First stages that are adjusted; by default those that exceed the costs' memory limit.
        migrated_forwards: Forwards that move before the first backward, x; by default the fewest that lose no time.
        swapped_blocks: Activations of the last adjusted stage's warm-up that leave the device, lambda_k; 0: no
            swapping.
        swapped_fraction: Share of each that leaves, beta.
        destination: `host`, or `peer`: the paired device p - 1 - s, as in BPipe.
    """
    adjusted = identify(adjusted_stages, devices=devices, micro_batches=micro_batches, costs=costs)

    def build(migrated_forwards: int) -> Schedule:
        return migrated_pipeline(
            "obscura-minimal",
            devices=devices,
            micro_batches=micro_batches,
            adjusted=adjusted,
            migrated_forwards=migrated_forwards,
            swapped_blocks=swapped_blocks,
            swapped_fraction=swapped_fraction,
            destination=destination,
        )

    if migrated_forwards is None:
        unlimited = (costs or StageCosts.of(stages=devices)).with_limit(None)
        most = most_migrated(devices, adjusted)
        target = simulate(build(most), unlimited).makespan
        migrated_forwards = bisect_left(
            range(most), True, key=lambda fewer: simulate(build(fewer), unlimited).makespan <= target
        )
    return build(migrated_forwards)


def migrated_pipeline(
    name: str,
    *,
    devices: int,
    micro_batches: int,
    adjusted: int,
    migrated_forwards: int,
    swapped_blocks: int = 0,
    swapped_fraction: Number = 1,
    destination: Destination = "host",
) -> Schedule:
    """1F1B whose `adjusted` first stages recompute, with x = `migrated_forwards` and lambda_k = `swapped_blocks`.

    Raises InputError for numbers out of range, or if a stage has no later device to swap with.
    """
    if migrated_forwards < 0:
        raise InputError(f"migrated_forwards must be 0 or more; it is {migrated_forwards}.")
    if swapped_blocks < 0 or not 0 < swapped_fraction <= 1:
        raise InputError(
            "swapped_blocks must be 0 or more and swapped_fraction above 0 and at most 1;"
            f" they are {swapped_blocks} and {swapped_fraction}."
        )
    if destination not in get_args(Destination):
        raise InputError(f"destination must be host or peer, not '{destination}'.")
    warm_up = [devices - s + (migrated_forwards if s < adjusted else 0) for s in range(devices)]
    orders = [alternate(s, micro_batches, warm_up=warm_up[s]) for s in range(devices)]
    if not swapped_blocks:
        return adjusted_pipeline(name, orders, micro_batches=micro_batches, adjusted=adjusted)
    for s in range(adjusted):
        alive = min(warm_up[s], micro_batches)
        orders[s] = swap(orders[s], warm_up=alive, blocks=min(swapped_blocks + adjusted - 1 - s, max(alive - 2, 0)))
    peers: dict[int, int] = {}
    if destination == "peer":
        if adjusted > devices // 2:
            raise InputError(f"Only {devices // 2} of {devices} stages have a later device to swap with.")
        peers = {s: devices - 1 - s for s in range(adjusted)}
    return replace(
        adjusted_pipeline(name, orders, micro_batches=micro_batches, adjusted=adjusted),
        offload_fraction=dict.fromkeys(range(adjusted), swapped_fraction),
        peers=peers,
    )


def most_migrated(devices: int, adjusted: int) -> int:
    """The most forwards to migrate, x = 2(p - k - 1): further ones would start no earlier."""
    return 2 * (devices - adjusted) if adjusted else 0
