"""Obscura's schedules: the strawman, dependency relaxation, and Obscura with activation swapping.

Source: Huang et al., Obscura, USENIX ATC 2025.  p = devices, m = micro_batches, k = adjusted_stages - 1.  Stages 0..k
are the adjusted stages: they recompute, and their forward bubbles become backward bubbles that hide the recomputation.

Strawman (section 3.2, figure 6): stage s <= k runs mu_s = 3(p - s) - 2 forwards before its first backward: those of
1F1B and 2(p - s - 1) migrated ones.  The other forwards stay at 1F1B's position: F of j directly after B of
j - (p - s).

Dependency relaxation (section 5.2, the middle of figure 9): stage s <= k has the strawman's warm-up; its remaining
forwards move left and alternate with the backwards from the first one on, so that adjusted stages no longer depend on
the pace of their neighbors.

Obscura (sections 5.3 and 6.1, the bottom of figure 9, figure 10): migration refinement removes needless migration, and
activations are swapped; lambda_k = swapped_blocks, beta = swapped_fraction.  Stage s <= k runs
mu_s = 3(p - k) - 2 + (k - s) forwards before its first backward: those of 1F1B and x = 2(p - k - 1) migrated ones.
The paper says to "align the number of backward bubbles with those in stage k", which does not determine mu_s.  Equal
mu_s would serialize neighboring adjusted stages and double the step time, so each stage has one more than the next.
As in the paper, lambda_s = lambda_k + (k - s).

Swapping (section 6.1, figure 10): mu = warm_up, lambda = blocks; an activation block is the output of one forward.  Of
every mu blocks alive, lambda are swapped out:

* eviction, in the warm-up: lambda blocks are evicted;
* eviction-loading, in the steady phase: per forward and backward, one block is evicted and one is loaded;
* loading, in the ending phase: the last lambda blocks are loaded, one per backward.

The paper does not say which blocks are swapped.  Here about equal numbers of blocks at the start and at the end of the
warm-up stay, so that several forwards hide an eviction and several periods hide a reload.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal

from debubble.ir import InputError, Number, Op, Placement, Schedule, StageCosts
from debubble.schedules.one_f_one_b import alternate, with_transfers
from debubble.schedules.registry import schedule
from debubble.simulator import simulate


def _register_deep(name: str, summary: str, *, bubble: str, in_turn: bool) -> Callable[..., Schedule]:
    """Register a schedule whose adjusted stages use the strawman's warm-up."""

    @schedule(name, paper="Obscura, ATC 2025", bubble=bubble, memory="min(m, 3 p - 2)")
    def build(
        *, devices: int, micro_batches: int, costs: StageCosts | None = None, adjusted_stages: int | None = None
    ) -> Schedule:
        adjusted = identify(adjusted_stages, devices=devices, micro_batches=micro_batches, costs=costs)
        orders = [
            alternate(s, micro_batches, warm_up=warm_up, distance=None if in_turn else devices - s)
            for s, warm_up in enumerate(deep_warm_ups(devices, adjusted))
        ]
        return adjusted_pipeline(name, orders, micro_batches=micro_batches, adjusted=adjusted)

    build.__doc__ = f"""{summary}

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Their memory limit chooses the adjusted stages; nothing else is read.
        adjusted_stages: First stages that are adjusted; by default those that exceed the costs' memory limit.
    """
    return build


strawman = _register_deep(
    "strawman",
    "The adjusted stages recompute, and run what fits of their forwards before the first backward.",
    bubble="(p - 1)(f + b), and r (max(1, m - 3(p - k - 1)) + k) of recomputation stays visible",
    in_turn=False,
)
dependency_relaxed = _register_deep(
    "dependency-relaxed",
    "The strawman with its remaining forwards and backwards in turn, so that bubbles hide any recomputation.",
    bubble="(p - 1)(f + b), and max(r, m r - 3(p - k - 1) f) + k r of recomputation stays visible",
    in_turn=True,
)


def identify(adjusted_stages: int | None, *, devices: int, micro_batches: int, costs: StageCosts | None) -> int:
    """The number of stages to adjust: `adjusted_stages` if set, else up to the last that exceeds its limit under 1F1B.

    It is 0 without costs or limit.  Raises InputError if the number is not within 0..devices.
    """
    if adjusted_stages is not None:
        if not 0 <= adjusted_stages <= devices:
            raise InputError(f"adjusted_stages must be between 0 and {devices}, the devices; it is {adjusted_stages}.")
        return adjusted_stages
    if costs is None or costs.memory_limit is None or costs.stages != devices:
        return 0
    over = [
        s
        for s in range(devices)
        if costs.static_of(s) + min(devices - s, micro_batches) * costs.activation[s] > (costs.limit_of(s) or 0)
    ]
    return over[-1] + 1 if over else 0


def adjusted_pipeline(name: str, orders: Iterable[Iterable[Op]], *, micro_batches: int, adjusted: int) -> Schedule:
    """The schedule of these orders, one per stage, whose adjusted stages recompute."""
    lists = list(orders)
    plain = Schedule.of(name, Placement.linear(len(lists)), micro_batches, lists)
    return replace(plain, fused_recompute=frozenset(range(adjusted)))


def deep_warm_ups(devices: int, adjusted: int) -> list[int]:
    """The strawman's mu_s per stage: 3(p - s) - 2 on adjusted stages, else p - s."""
    return [3 * (devices - s) - 2 if s < adjusted else devices - s for s in range(devices)]


def swap(order: Iterable[Op], *, warm_up: int, blocks: int) -> list[Op]:
    """Add evictions and reloads of lambda = `blocks` activation blocks to the order of one stage.

    Raises InputError unless 0 <= blocks <= warm_up - 2: the next backward's block and the newest one have to stay.
    """
    if blocks == 0:
        return list(order)
    if not 0 < blocks <= warm_up - 2:
        raise InputError(
            f"A stage with {warm_up} forwards before its first backward can swap 0 to {max(warm_up - 2, 0)} blocks,"
            f" not {blocks}."
        )
    plain = list(order)
    micro_batches = 1 + max(op.micro_batch for op in plain)
    lead = first_swapped(warm_up, blocks)
    return with_transfers(plain, range(lead, micro_batches - (warm_up - blocks - lead)), ahead=lead)


def first_swapped(warm_up: int, blocks: int) -> int:
    """The first micro-batch that is evicted, and the number of backwards by which each reload precedes its own."""
    return (warm_up - blocks + 1) // 2


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
        migrated_forwards=max_migrated(devices, adjusted),
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
    build = partial(
        migrated_pipeline, "obscura-minimal", devices=devices, micro_batches=micro_batches, adjusted=adjusted,
        swapped_blocks=swapped_blocks, swapped_fraction=swapped_fraction, destination=destination,
    )  # fmt: skip
    unlimited = (costs or StageCosts.of(stages=devices)).with_limit(None)

    def makespan(migrated: int) -> Number:
        return simulate(build(migrated_forwards=migrated), unlimited).makespan

    if migrated_forwards is None:
        largest = max_migrated(devices, adjusted)
        target = makespan(largest)
        migrated_forwards = bisect_left(range(largest), True, key=lambda fewer: makespan(fewer) <= target)
    return build(migrated_forwards=migrated_forwards)


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


def max_migrated(devices: int, adjusted: int) -> int:
    """The largest useful x, 2(p - k - 1): further forwards would start no earlier."""
    return 2 * (devices - adjusted) if adjusted else 0
