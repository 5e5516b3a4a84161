"""What is left of a plan's schedule when a target knows fewer operations, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from debubble.ir import ExportError, Kind, OutOfMemoryError, Plan, Schedule
from debubble.schedules import schedules
from debubble.simulator import simulate

_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class Reduction:
    """A schedule of F, B, I and W alone, and what was lost on the way."""

    schedule: Schedule
    losses: tuple[str, ...]


def compute_only(plan: Plan, *, target: str) -> Reduction:
    """The plan without offload, with recomputation in the backward, and with one optimizer step at the end.

    Raises ExportError if it then no longer fits in memory.
    """
    s = plan.schedule
    if s.host_steps:
        raise ExportError(
            f"{target} keeps all optimizer states on the devices, and this plan keeps some on the host to fit; plan"
            " again with a planner that does not, such as scope."
        )
    reduced = replace(
        s,
        orders=tuple(tuple(op for op in order if op.kind in _COMPUTE) for order in s.orders),
        fused_recompute=s.fused_recompute | {stage for stage, _ in s.explicit_recompute},
        offload_fraction={},
        peers={},
    )
    losses: list[str] = []
    if s.offloaded:
        losses.append(f"Offload: all activations stay on their devices, also the {len(s.offloaded)} to be moved.")
    if s.explicit_recompute:
        losses.append("Recomputation that the plan places in bubbles happens right before the backward.")
    if any(op.kind not in (*_COMPUTE, Kind.O, Kind.L, Kind.R) for op in s.operations):
        losses.append("Optimizer steps and gradient reductions among the micro-batches move to the end of the step.")
    if not losses:
        return Reduction(reduced, ())
    predicted = plan.simulate().makespan
    try:
        slowed = simulate(reduced, plan.costs).makespan
    except OutOfMemoryError as error:
        raise ExportError(f"{target} cannot run this plan, whose memory depends on offload: {error}") from error
    losses.append(f"With that the step is predicted to take {float(slowed / predicted):.3f} times as long as planned.")
    return Reduction(reduced, tuple(losses))


def require_order(reduced: Schedule, *, target: str, names: tuple[str, ...]) -> str:
    """Which of the library's schedules this order is.  Raises ExportError if it is none of `names`."""
    for name in names:
        entry = schedules[name]
        chunks = reduced.placement.chunks
        if (chunks > 1) != (entry.default_chunks > 1) or reduced.stages != chunks * reduced.devices:
            continue
        if chunks > 1 and reduced.micro_batches % reduced.devices:
            continue
        built = entry(
            devices=reduced.devices, micro_batches=reduced.micro_batches, chunks=chunks if chunks > 1 else None
        )
        if built.placement == reduced.placement and built.orders == reduced.orders:
            return name
    raise ExportError(
        f"{target} runs its own {' or '.join(names)} order, and this plan's '{reduced.name}' is another; export it to"
        " torch, torchtitan or automodel, or plan again with `--planner adapipe`, which keeps to 1f1b."
    )
