"""PipeOffload and AdaOffload: activations wait in host memory between their forward and their backward.

Sources: Wan et al., PipeOffload, ICML 2025; OptPipe (Li et al.), section 4.1.3 and appendix D, algorithm 1.  Their B is
our I.  PipeOffload's order of computation is its GIS (`group_interleaved`), with one chunk per device 1F1B's.

Each has two variants.  `paper` is the rule as printed, repaired where it cannot be meant.  `tuned` tries that rule
next to its relatives (which activations go, where W stands, how many forwards come first) and takes the fastest by
simulation, so that it is never slower.  AdaOffload's relatives include PipeOffload's, to whose rules it falls back
"when memory is limited, or the offloading time becomes excessively long".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from debubble.ir import InfeasibleError, InputError, Kind, Number, Placement, Schedule, StageCosts
from debubble.schedules.interleaved import in_groups
from debubble.schedules.registry import schedule
from debubble.schedules.transfers import ComputeOrder, Offload
from debubble.schedules.zero_bubble import split_order
from debubble.search.problem import Objective
from debubble.simulator import simulate

Variant = Literal["tuned", "paper"]
Way = tuple[ComputeOrder, Callable[[ComputeOrder], Schedule]]
"""An order of computation, and the rule that adds its transfers."""


@schedule(
    "pipeoffload",
    paper="PipeOffload, ICML 2025",
    bubble="(p - 1)(f + i) / v, under a memory_limit (p - 1)(f + i - min(f, i, w)) / v, where the link keeps up",
    memory="about p / 2 for half, less for full, or memory_limit",
    default_chunks=2,
)
def pipeoffload(
    *,
    devices: int,
    micro_batches: int,
    chunks: int = 2,
    costs: StageCosts | None = None,
    offload: Offload | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    group: int | None = None,
    variant: Variant = "tuned",
    objective: Objective = "makespan",
) -> Schedule:
    """Group-interleaved with the longest-lived activations on the host.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Times and bytes per stage; without an offload time, half a forward's is taken.
        offload: `half` or `full`; by default what the memory limit asks for, and half without one.
        memory_limit: Bytes per device, as in StageCosts.
        group: As in `group-interleaved`.
        variant: `tuned`, the fastest of: the fewest activations that make it fit, all, and the paper's rule, with W
            after its I or, under a limit, delayed.  `paper`, as OptPipe (section 4.1.3) describes and uses it: every
            activation goes and comes back just in time, and the backward is one piece.  The original offloads whole
            chunks on a fixed grid of copies and refuses what misses it; here a late copy is a wait.
        objective: `makespan` or `span`, by which the fastest is chosen.

    Raises:
        InfeasibleError: It does not fit the memory limit even if everything is offloaded.
    """
    if variant == "paper" and offload == "half":
        raise InputError("The paper's variant offloads everything: leave 'offload' out, or ask for variant 'tuned'.")
    costs = _with_link(costs or StageCosts.of(stages=devices * chunks), memory_limit)
    build = partial(in_groups, "pipeoffload", micro_batches, chunks, ahead=range(devices, 0, -1), group=group)
    together = build(delays=[0] * devices)
    if variant == "paper":
        return ComputeOrder(_whole(together), costs).just_in_time()
    if offload is not None:
        return ComputeOrder(together, costs).selective(offload)
    orders = [together] if costs.memory_limit is None else [together, build(delays=range(devices))]
    return _fastest([*_ways(orders, costs), _paper_way(together, costs)], costs, objective)


@schedule(
    "adaoffload",
    paper="OptPipe, appendix D",
    bubble="at most (p - 1)(f + i - min(f, i, w)) where memory and link allow, PipeOffload's where not",
    memory="memory_limit",
)
def adaoffload(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    tolerance: Number = 0,
    variant: Variant = "tuned",
    objective: Objective = "makespan",
) -> Schedule:
    """PipeOffload with the time before each stage's first backward filled with forwards.

    Args:
        devices: Pipeline devices, p, with one stage each.
        micro_batches: Micro-batches of a step, m.
        costs: Times and bytes per stage; without an offload time, half a forward's is taken.
        memory_limit: Bytes per device, as in StageCosts.
        tolerance: Time by which the first backward may be late for more forwards, T.
        variant: `paper`, algorithm 1: `forwards_ahead`, then one I, one W and one F at a time, every activation
            offloaded and reloaded just in time.  `tuned`, the fastest of that, of 1F1B's forwards instead, of fewer
            offloads, of W delayed, and of PipeOffload.
        objective: `makespan` or `span`, by which the fastest is chosen.

    Raises:
        InfeasibleError: It does not fit the memory limit even if everything is offloaded.
    """
    costs = _with_link(costs or StageCosts.of(stages=devices), memory_limit)
    one_f_one_b = tuple(devices - s for s in range(devices))
    printed = forwards_ahead(costs, micro_batches, tolerance, least=one_f_one_b)

    def order(ahead: Sequence[int], *, delayed: bool = False) -> Schedule:
        lists = [split_order(s, micro_batches, n, delay=(ahead[0] - n) * delayed) for s, n in enumerate(ahead)]
        return Schedule.of("adaoffload", Placement.linear(devices), micro_batches, lists)

    if variant == "paper":
        return ComputeOrder(order(printed), costs).just_in_time()
    unfilled = forwards_ahead(costs, micro_batches, tolerance, least=(1,) * devices)
    fills = dict.fromkeys((printed, unfilled, one_f_one_b))
    orders = [order(ahead, delayed=delayed) for ahead in fills for delayed in (False, True)]
    return _fastest([*_ways(orders, costs), _paper_way(order(one_f_one_b), costs)], costs, objective)


def forwards_ahead(
    costs: StageCosts, micro_batches: int, tolerance: Number, *, least: Sequence[int]
) -> tuple[int, ...]:
    """AdaOffload's steps 1 and 2: the forwards of each stage before its first backward.

    Four lines of the print cannot be meant.  Line 18 waits for F_{s-1,n_mb}, the last micro-batch on the stage before,
    where it must be F_{s-1,m}; it also waits for the offload just before, although the text fills memory: here only a
    forward without a free place waits, for the oldest offload.  Line 19 uses complete(F_{s,m}) before line 20 sets it.
    The memory limit, which the text asks for, is missing: it gives each stage its places.  The tolerance is T; `least`
    forwards each stage has in any case, as far as its places and the stage before allow.
    """
    transfers = costs.transfers
    assert transfers is not None
    ahead: list[int] = []
    arrivals: list[Number] = [0] * micro_batches
    for s in range(costs.stages):
        first_backward = _first_backward(costs, s) + tolerance
        places = _places(costs, s)
        end: Number = 0
        offloaded: list[Number] = []
        sent: list[Number] = []
        for j, arrival in enumerate(arrivals):
            before = offloaded[-1] if offloaded else 0
            late = max(end, before + transfers.reload[s]) >= first_backward
            if late and j >= max(1, min(least[s], places)):
                break
            start = max(end, arrival, offloaded[j - places] if j >= places else 0)
            end = start + costs.forward[s]
            offloaded.append(max(end, before) + transfers.offload[s])
            sent.append(end + costs.communication[s])
        ahead.append(len(sent))
        arrivals = sent
    return tuple(ahead)


def _first_backward(costs: StageCosts, stage: int) -> Number:
    """EstStart: the first micro-batch goes to the last stage and comes back without waiting."""
    way: Number = sum(costs.forward) + sum(costs.communication[:-1])
    return way + sum(costs.backward_input[s] + costs.communication[s - 1] for s in range(stage + 1, costs.stages))


def _places(costs: StageCosts, stage: int) -> int:
    """Activations that fit next to each other."""
    capacity = costs.capacity_of(stage)
    if capacity is None or not costs.activation[stage]:
        return int(1e9)
    return max(1, int(capacity // costs.activation[stage]))


def _with_link(costs: StageCosts, memory_limit: Number | Sequence[Number] | None) -> StageCosts:
    if costs.offload is None:
        costs = costs.replace(offload=[f / 2 for f in costs.forward], reload=None)
    return costs if memory_limit is None else costs.with_limit(memory_limit)


def _whole(schedule: Schedule) -> Schedule:
    """The schedule, in which each W follows its I, with backwards in one piece."""
    whole = {Kind.I: Kind.B}
    return schedule.replacing(lambda op: () if op.kind is Kind.W else (op._replace(kind=whole.get(op.kind, op.kind)),))


def _ways(orders: Iterable[Schedule], costs: StageCosts) -> Iterator[Way]:
    """Every order of computation with each rule of what to offload."""
    for base in orders:
        order = ComputeOrder(base, costs)
        yield order, ComputeOrder.selective
        if costs.memory_limit is not None:
            yield order, partial(ComputeOrder.selective, offload="full")
        yield order, ComputeOrder.just_in_time


def _paper_way(order: Schedule, costs: StageCosts) -> Way:
    """The paper's rule: whole backwards, everything just in time."""
    return ComputeOrder(_whole(order), costs), ComputeOrder.just_in_time


def _fastest(ways: Iterable[Way], costs: StageCosts, objective: Objective) -> Schedule:
    """The fastest schedule by simulation; raises a way's refusal if none fits."""
    best: tuple[Number, Schedule] | None = None
    refusal: InfeasibleError | None = None
    # What promises most is tried first: where it keeps its promise, the others need no simulation.
    for order, rule in sorted(ways, key=lambda way: _least_time(way[0], objective)):
        if best is not None and _least_time(order, objective) >= best[0]:
            break
        try:
            built = rule(order)
            timeline = simulate(built, costs)
        except InfeasibleError as error:
            refusal = refusal or error
            continue
        time = timeline.makespan if objective == "makespan" else timeline.span
        if best is None or time < best[0]:
            best = time, built
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _least_time(order: ComputeOrder, objective: Objective) -> Number:
    """A time that the order takes with any transfers, where one is known: its makespan without them."""
    if objective != "makespan" or order.costs.communication_model != "latency":
        return 0
    return order.timeline.makespan
