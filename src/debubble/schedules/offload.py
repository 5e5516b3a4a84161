"""PipeOffload and AdaOffload: activations are in host memory between their forward and their backward.

Sources: Wan et al., PipeOffload, ICML 2025; OptPipe (Li et al.), section 4.1.3 and appendix D, algorithm 1.  Their B is
our I.  PipeOffload's order of computation is its GIS (`group_interleaved`), which is 1F1B with one chunk per device.

Each has two variants.  `paper` is the rule as printed, with corrections of evident errors.  `tuned` also tries
variations of that rule (which activations to offload, the position of W, the number of warm-up forwards) and returns
the fastest by simulation, so it is never slower.  AdaOffload's variations include PipeOffload, to whose rules it falls
back "when memory is limited, or the offloading time becomes excessively long".
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
Candidate = tuple[ComputeOrder, Callable[[ComputeOrder], Schedule]]
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
        offload: `half` or `full`; by default what the memory limit requires, and half without one.
        memory_limit: Bytes per device, as in StageCosts.
        group: As in `group-interleaved`.
        variant: `tuned`, the fastest of: the fewest activations that make it fit, all, and the paper's rule, with W
            after its I or, under a limit, delayed.  `paper`, as OptPipe (section 4.1.3) describes and uses it: every
            activation is offloaded and reloaded just in time, and backwards are fused.  The original offloads full
            chunks on a fixed grid of copies and rejects copies that miss it; here a late copy causes a wait.
        objective: `makespan` or `span`, by which the fastest is chosen.

    Raises:
        InfeasibleError: It does not fit the memory limit even if everything is offloaded.
    """
    if variant == "paper" and offload == "half":
        raise InputError("The paper's variant offloads everything: leave 'offload' out, or ask for variant 'tuned'.")
    costs = _with_link(costs or StageCosts.of(stages=devices * chunks), memory_limit)
    build = partial(in_groups, "pipeoffload", micro_batches, chunks, ahead=range(devices, 0, -1), group=group)
    undelayed = build(delays=[0] * devices)
    if variant == "paper":
        return ComputeOrder(_with_fused_backwards(undelayed), costs).just_in_time()
    if offload is not None:
        return ComputeOrder(undelayed, costs).selective(offload)
    orders = [undelayed] if costs.memory_limit is None else [undelayed, build(delays=range(devices))]
    return _fastest([*_candidates(orders, costs), _paper_candidate(undelayed, costs)], costs, objective)


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
        tolerance: Time by which the first backward may be delayed for more forwards, T.
        variant: `paper`, algorithm 1: `forwards_ahead`, then I, W and F alternately, every activation offloaded and
            reloaded just in time.  `tuned`, the fastest of that, of 1F1B's number of forwards, of fewer offloads, of
            delayed W, and of PipeOffload.
        objective: `makespan` or `span`, by which the fastest is chosen.

    Raises:
        InfeasibleError: It does not fit the memory limit even if everything is offloaded.
    """
    costs = _with_link(costs or StageCosts.of(stages=devices), memory_limit)
    one_f_one_b = tuple(devices - s for s in range(devices))
    paper_ahead = forwards_ahead(costs, micro_batches, tolerance, min_ahead=one_f_one_b)

    def order(ahead: Sequence[int], *, delayed: bool = False) -> Schedule:
        lists = [split_order(s, micro_batches, n, delay=(ahead[0] - n) * delayed) for s, n in enumerate(ahead)]
        return Schedule.of("adaoffload", Placement.linear(devices), micro_batches, lists)

    if variant == "paper":
        return ComputeOrder(order(paper_ahead), costs).just_in_time()
    link_ahead = forwards_ahead(costs, micro_batches, tolerance, min_ahead=(1,) * devices)
    ahead_choices = dict.fromkeys((paper_ahead, link_ahead, one_f_one_b))
    orders = [order(ahead, delayed=delayed) for ahead in ahead_choices for delayed in (False, True)]
    return _fastest([*_candidates(orders, costs), _paper_candidate(order(one_f_one_b), costs)], costs, objective)


def forwards_ahead(
    costs: StageCosts, micro_batches: int, tolerance: Number, *, min_ahead: Sequence[int]
) -> tuple[int, ...]:
    """AdaOffload's steps 1 and 2: the forwards of each stage before its first backward.

    Four points of the printed algorithm are corrected.  Line 18 waits for F_{s-1,n_mb}, the last micro-batch on the
    previous stage, instead of F_{s-1,m}; it also waits for the previous offload, although the text fills the memory:
    here a forward waits only if memory is full, for the oldest offload.  Line 19 uses complete(F_{s,m}) before line 20
    sets it.  The memory limit, which the text requires, is missing: it determines each stage's capacity.  The tolerance
    is T; each stage runs at least `min_ahead` forwards, if its capacity and the previous stage allow.
    """
    transfers = costs.transfers
    assert transfers is not None
    ahead: list[int] = []
    arrivals: list[Number] = [0] * micro_batches
    for s in range(costs.stages):
        first_backward = _first_backward(costs, s) + tolerance
        capacity = _capacity(costs, s)
        end: Number = 0
        offloaded: list[Number] = []
        sent: list[Number] = []
        for j, arrival in enumerate(arrivals):
            previous = offloaded[-1] if offloaded else 0
            is_late = max(end, previous + transfers.reload[s]) >= first_backward
            if is_late and j >= max(1, min(min_ahead[s], capacity)):
                break
            start = max(end, arrival, offloaded[j - capacity] if j >= capacity else 0)
            end = start + costs.forward[s]
            offloaded.append(max(end, previous) + transfers.offload[s])
            sent.append(end + costs.communication[s])
        ahead.append(len(sent))
        arrivals = sent
    return tuple(ahead)


def _first_backward(costs: StageCosts, stage: int) -> Number:
    """EstStart: the start of a stage's first backward if the first micro-batch never waits."""
    forward: Number = sum(costs.forward) + sum(costs.communication[:-1])
    return forward + sum(costs.backward_input[s] + costs.communication[s - 1] for s in range(stage + 1, costs.stages))


def _capacity(costs: StageCosts, stage: int) -> int:
    """Number of activations that fit in memory."""
    capacity = costs.capacity_of(stage)
    if capacity is None or not costs.activation[stage]:
        return int(1e9)
    return max(1, int(capacity // costs.activation[stage]))


def _with_link(costs: StageCosts, memory_limit: Number | Sequence[Number] | None) -> StageCosts:
    if costs.offload is None:
        costs = costs.replace(offload=[f / 2 for f in costs.forward], reload=None)
    return costs if memory_limit is None else costs.with_limit(memory_limit)


def _with_fused_backwards(schedule: Schedule) -> Schedule:
    """The schedule, in which each W follows its I, with fused backwards."""
    fused = {Kind.I: Kind.B}
    return schedule.replacing(lambda op: () if op.kind is Kind.W else (op._replace(kind=fused.get(op.kind, op.kind)),))


def _candidates(orders: Iterable[Schedule], costs: StageCosts) -> Iterator[Candidate]:
    """Every order of computation with each rule for transfers."""
    for base in orders:
        order = ComputeOrder(base, costs)
        yield order, ComputeOrder.selective
        if costs.memory_limit is not None:
            yield order, partial(ComputeOrder.selective, offload="full")
        yield order, ComputeOrder.just_in_time


def _paper_candidate(order: Schedule, costs: StageCosts) -> Candidate:
    """The paper's rule: fused backwards, and all transfers just in time."""
    return ComputeOrder(_with_fused_backwards(order), costs), ComputeOrder.just_in_time


def _fastest(candidates: Iterable[Candidate], costs: StageCosts, objective: Objective) -> Schedule:
    """The fastest candidate by simulation; raises the first InfeasibleError if none fits."""
    best: tuple[Number, Schedule] | None = None
    first_error: InfeasibleError | None = None
    # Candidates in the order of their bounds, so that later ones often need no simulation.
    for order, rule in sorted(candidates, key=lambda candidate: _lower_bound(candidate[0], objective)):
        if best is not None and _lower_bound(order, objective) >= best[0]:
            break
        try:
            built = rule(order)
            timeline = simulate(built, costs)
        except InfeasibleError as error:
            first_error = first_error or error
            continue
        time = timeline.makespan if objective == "makespan" else timeline.span
        if best is None or time < best[0]:
            best = time, built
    if best is None:
        assert first_error is not None
        raise first_error
    return best[1]


def _lower_bound(order: ComputeOrder, objective: Objective) -> Number:
    """A lower bound on the order's time with any transfers: its makespan without them, or 0."""
    if objective != "makespan" or order.costs.communication_model != "latency":
        return 0
    return order.timeline.makespan
