"""AdaOffload: as many forwards before the first backward as time, link and memory allow; then PipeOffload's rules.

Source: OptPipe (Li et al.), appendix D, algorithm 1.  Its B is our I.  Printed faults, corrected here: line 18 waits
for F of the last micro-batch on the stage before, where F of the same one is meant; line 19 uses the end of a forward
before line 20 sets it; and the memory limit that the text asks for is missing.

Step 1 estimates when the first gradient reaches each stage.  Step 2 fills the time until then with forwards, each
followed by its offload; a forward without a free slot waits for the oldest offload.  Step 3 continues one I, one W and
one F at a time, every activation offloaded and reloaded in time for its I.  With little memory or a slow link the
result is PipeOffload's, which is tried beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from debubble.ir import Number, OutOfMemoryError, Placement, Schedule, StageCosts
from debubble.schedules.pipeoffload import with_transfers
from debubble.schedules.registry import schedule
from debubble.schedules.zero_bubble import split_order
from debubble.simulator import simulate

COMPARED = 2_000
"""Operations up to which the ways are compared on the whole step, and not on its first micro-batches."""


@schedule(
    "adaoffload",
    paper="OptPipe, appendix D",
    bubble="(p - 1)(f + i - w) where memory and link allow, PipeOffload's where not",
    memory="memory_limit",
)
def adaoffload(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    tolerance: Number = 0,
) -> Schedule:
    """Offload everything; fill the time before each stage's first backward with forwards.

    `tolerance`: time by which the first backward may be late for more forwards.  `memory_limit`: bytes per device, as
    in StageCosts.  Raises OutOfMemoryError if PipeOffload's rules do not fit either.
    """
    costs = costs or StageCosts.of(stages=devices)
    if costs.offload is None:
        costs = costs.replace(offload=[f / 2 for f in costs.forward], reload=None)
    if memory_limit is not None:
        costs = costs.with_limit(memory_limit)
    modes = ("full",) if costs.memory_limit is None else ("full", None)
    ways = list(product((True, False), (False, True), modes))
    operations = 3 * devices * micro_batches
    sample = micro_batches if operations <= COMPARED else min(micro_batches, 2 * devices)
    refusal: OutOfMemoryError | None = None
    ranked: list[tuple[Number, int]] = []
    for n, way in enumerate(ways):
        try:
            ranked.append((simulate(_offloading(costs, sample, tolerance, *way), costs).makespan, n))
        except OutOfMemoryError as error:
            refusal = error
    for _, n in sorted(ranked):
        try:
            return _offloading(costs, micro_batches, tolerance, *ways[n])
        except OutOfMemoryError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _offloading(
    costs: StageCosts, micro_batches: int, tolerance: Number, dense: bool, together: bool, offload: str | None
) -> Schedule:
    """With the forwards of step 2 or 1F1B's before the first backward, and W at once or delayed."""
    devices = costs.stages
    ahead = forwards_ahead(costs, micro_batches, tolerance) if dense else [devices - s for s in range(devices)]
    orders = [split_order(s, micro_batches, n, delay=0 if together else ahead[0] - n) for s, n in enumerate(ahead)]
    base = Schedule.of("adaoffload", Placement.linear(devices), micro_batches, orders)
    return with_transfers(base, costs, offload)


def forwards_ahead(costs: StageCosts, micro_batches: int, tolerance: Number) -> list[int]:
    """Steps 1 and 2: per stage, the forwards before its first backward."""
    assert costs.offload is not None
    ahead: list[int] = []
    arrivals: list[Number] = [0] * micro_batches
    for s in range(costs.stages):
        first_backward = _first_backward(costs, s) + tolerance
        slots = _slots(costs, s)
        end: Number = 0
        moved: list[Number] = []
        sent: list[Number] = []
        for j, arrival in enumerate(arrivals):
            before = moved[-1] if moved else 0
            if j and max(end, before + costs.offload[s]) >= first_backward:
                break
            start = max(end, arrival, moved[j - slots] if j >= slots else 0)
            end = start + costs.forward[s]
            moved.append(max(end, before) + costs.offload[s])
            sent.append(end + costs.communication[s])
        ahead.append(len(sent))
        arrivals = sent
    return ahead


def _first_backward(costs: StageCosts, stage: int) -> Number:
    """EstStart: the first micro-batch goes to the last stage and comes back without waiting."""
    way: Number = sum(costs.forward) + sum(costs.communication[:-1])
    return way + sum(costs.backward_input[s] + costs.communication[s - 1] for s in range(stage + 1, costs.stages))


def _slots(costs: StageCosts, stage: int) -> int:
    """Activations that fit beside each other."""
    limit = costs.limit_of(stage)
    if limit is None or not costs.activation[stage]:
        return int(1e9)
    return max(1, int((limit - costs.static_of(stage)) // costs.activation[stage]))
