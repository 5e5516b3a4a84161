from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs import StepTail, Strategy, Unit, Units
from debubble.costs.unit import HostStates, StateBytes
from debubble.ir import DebubbleError, InfeasibleError, RunOptions
from debubble.planners import planners
from debubble.planners.bounds.host_steps import finished_units, min_host_steps
from debubble.planners.bounds.proven import (
    CONTIGUOUS,
    GRANULAR,
    RAMPS,
    WORK_AND_PATH,
    lower_bound,
    proven_bound,
    proven_step_bound,
)
from debubble.planners.bounds.ramps import Piece, Pieces, pieces_of_units, ramps_bound
from debubble.planners.bounds.whole_units import contiguous_bound, granular_bound
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution


@st.composite
def pieces(draw: st.DrawFn) -> Pieces:
    """Few pieces of few kinds, on one to three devices."""
    kinds = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=7))
    return Pieces(
        pieces=tuple(Piece(work, 0, 0, states, states, 0, 0, ((1, 0),)) for work, states in chosen),
        capacities=tuple(draw(st.lists(st.integers(4, 16), min_size=1, max_size=3))),
        micro_batches=draw(st.integers(1, 3)),
        communication=0,
        bytes_per_second=0,
    )


def best_way_to_deal(a: Pieces, waits: Sequence[float]) -> float:
    """The least time in which all devices are done, each of which waits for its first forward."""
    devices = range(len(a.capacities))
    best = float("inf")
    for dealt in product(devices, repeat=len(a.pieces)):
        work, states = [0.0] * len(devices), [0.0] * len(devices)
        for device, piece in zip(dealt, a.pieces, strict=True):
            work[device] += piece.work
            states[device] += piece.hosted
        if all(held <= capacity for held, capacity in zip(states, a.capacities, strict=True)):
            best = min(best, max(wait + a.micro_batches * each for wait, each in zip(waits, work, strict=True)))
    return best


@given(pieces(), st.integers(0, 3))
@settings(max_examples=50)
def test_the_granular_bound_is_the_best_of_all_ways_to_deal_units(a: Pieces, communication: int) -> None:
    assert granular_bound(a) == pytest.approx(best_way_to_deal(a, [0] * len(a.capacities)), rel=1e-8)
    # Devices wait for their first forward.
    a = replace(a, capacities=(a.capacities[0],) * len(a.capacities), communication=communication)
    waits = [k * communication + sum(piece.forward for piece in a.pieces[:k]) for k in range(len(a.capacities))]
    assert granular_bound(a, arrivals=True) == pytest.approx(best_way_to_deal(a, waits), rel=1e-8)


@st.composite
def hosted_pieces(draw: st.DrawFn) -> Pieces:
    """Few pieces of few kinds, whose optimizer states hosts may have, on one to three devices."""
    number = st.integers(0, 4)
    kinds = draw(st.lists(st.tuples(number, number, st.integers(0, 9), number, number), min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=6))
    return Pieces(
        pieces=tuple(
            Piece(
                1, 1, 1, stays + moves, stays, step if moves else 0, 0, ((activation, 0),), workspace=workspace,
                activation=activation,
            )
            for stays, moves, step, workspace, activation in chosen
        ),
        capacities=tuple(draw(st.lists(st.integers(4, 20), min_size=1, max_size=3))),
        micro_batches=1,
        communication=0,
        bytes_per_second=0,
    )  # fmt: skip


def ways_to_offload(own: Sequence[Piece], capacity: float) -> Iterator[list[Piece]]:
    """The sets of a device's pieces whose states may be the host's, so that the others fit."""
    transient = sum(max((getattr(p, name) for p in own), default=0) for name in ("workspace", "activation"))
    for chosen in product((False, True), repeat=len(own)):
        held = [piece.hosted if hosted else piece.static for piece, hosted in zip(own, chosen, strict=True)]
        if sum(held) + transient <= capacity:
            yield [piece for piece, hosted in zip(own, chosen, strict=True) if hosted]


def dealt_pieces(a: Pieces) -> Iterator[list[list[Piece]]]:
    """The pieces of every device, in all ways to assign them."""
    for dealt in product(range(len(a.capacities)), repeat=len(a.pieces)):
        yield [[piece for piece, at in zip(a.pieces, dealt, strict=True) if at == d] for d in range(len(a.capacities))]


def seconds_of(hosted: Sequence[Piece]) -> float:
    return sum(piece.host_step for piece in hosted)


def least_steps_of_all_ways(a: Pieces) -> float:
    """The least time of host steps on the device with most, over all ways to assign pieces and to offload states."""
    return min(
        max(
            min(map(seconds_of, ways_to_offload(own, size)), default=inf)
            for own, size in zip(held, a.capacities, strict=True)
        )
        for held in dealt_pieces(a)
    )


@given(hosted_pieces())
@settings(max_examples=60)
def test_host_steps_are_the_least_of_all_ways_to_deal_units(a: Pieces) -> None:
    assume(any(piece.host_step for piece in a.pieces))
    assert min_host_steps(a) == pytest.approx(least_steps_of_all_ways(a), rel=1e-8)


def best_partition(a: Pieces, chunks: int) -> float:
    """The least time in which all devices are done, over all ways to cut the model into so many stages on each."""
    best = float("inf")
    number = len(a.capacities) * chunks
    for inner in combinations(range(1, len(a.pieces)), number - 1):
        stages = [a.pieces[begin:end] for begin, end in pairwise((0, *inner, len(a.pieces)))]
        for device_of in product(range(len(a.capacities)), repeat=number):
            held = [[n for n, at in enumerate(device_of) if at == d] for d in range(len(a.capacities))]
            if any(len(each) != chunks for each in held):
                continue
            if any(sum(p.hosted for n in each for p in stages[n]) > a.capacities[d] for d, each in enumerate(held)):
                continue
            messages = [sum(a != b for a, b in pairwise(device_of[: each[0] + 1])) for each in held]
            before = [
                a.communication * sent + sum(p.forward for stage in stages[: each[0]] for p in stage)
                for sent, each in zip(messages, held, strict=True)
            ]
            works = [sum(p.work for n in each for p in stages[n]) for each in held]
            times = [wait + a.micro_batches * work for wait, work in zip(before, works, strict=True)]
            best = min(best, max(times))
    return best


@given(pieces(), st.integers(1, 2), st.sampled_from([0, 1, 100]))
@settings(max_examples=80)
def test_no_partition_into_as_many_stages_beats_the_contiguous_bound(
    a: Pieces, chunks: int, communication: int
) -> None:
    a = replace(a, capacities=(a.capacities[0],) * len(a.capacities), communication=communication)
    if len(a.pieces) < len(a.capacities) * chunks:
        return
    least = granular_bound(a, arrivals=True)
    bound = contiguous_bound(a, chunks=(chunks,), known_bound=least, arrivals=True)
    assert least * (1 - 1e-8) <= bound <= best_partition(a, chunks) * (1 + 1e-8)


def halves_and_head(layers: int) -> tuple[Unit, ...]:
    """Layers of an attention of 5 and an MLP of 7, and a head of 4."""
    works = [5, 7] * layers + [4]
    return tuple(
        Unit(
            type="layer", layer=None, forward=0, backward_input=0, backward_weight=work, static=0,
            strategies={"none": Strategy(0)},
        )
        for work in works
    )  # fmt: skip


def test_a_device_of_three_stages_cannot_hold_four_attentions_alone() -> None:
    problem = Problem(workload=ModelUnits(Units(units=halves_and_head(6))), devices=4, micro_batches=10)
    # Dealt freely, devices take 19 each, one of them three attentions and the head.  In three stages either the head's
    # device has three of the twelve halves, of which one is an MLP, or another one has four, of which one is an MLP.
    assert float(proven_bound(problem).time) == pytest.approx(10 * 19)
    three = replace(problem, chunks=3)
    assert proven_bound(three).argument == CONTIGUOUS
    assert float(proven_bound(three).time) == pytest.approx(10 * min(5 + 5 + 7 + 4, 5 + 5 + 5 + 7))


def uniform(**changes: object) -> Piece:
    piece = Piece(1, 1, 1, 0, 0, 0, 1, ((2, 0), (1, 1)))
    return replace(piece, **changes)  # type: ignore[arg-type]


def test_little_memory_is_idle_time_or_recomputation() -> None:
    a = Pieces((uniform(strategies=((2, 0),)),) * 4, (4, 4), micro_batches=8, communication=0, bytes_per_second=0)
    # Only four activations are there at a time: four of the 8 forwards, and 4 x 2 of the 2 x 5 operations that fit into
    # the last stretch.
    assert ramps_bound(a) == pytest.approx((4 * 8 * 3 + (8 - 4) + (10 - 8)) / 2)
    assert ramps_bound(replace(a, bytes_per_second=10.0)) < ramps_bound(a)


def test_an_optimizer_takes_its_time_inside_the_pipeline_or_behind_it() -> None:
    units = (uniform(optimizer=2.0),) * 4
    a = Pieces(units, (100, 100), micro_batches=8, communication=0, bytes_per_second=0)
    # Device 1 begins a unit's forward later, at least.
    assert ramps_bound(a) == pytest.approx(4 * 8 * 3 / 2 + 0.5)
    assert ramps_bound(a, after=4) == pytest.approx(4 * 8 * 3 / 2 + 0.5 + 4)
    assert ramps_bound(a, after=1) == pytest.approx(4 * 8 * 3 / 2 + 0.5 + 1)
    assert ramps_bound(a, known_bound=60, after=4) == pytest.approx(60)
    # Hosts step behind last gradients: fast ones while others are computed, slow ones for longer than the pipeline.
    fast, slow = (
        replace(a, pieces=(uniform(optimizer=2.0, static=1, hosted=0, host_step=step),) * 4) for step in (5, 5000)
    )
    assert ramps_bound(fast, after=4) == pytest.approx(4 * 8 * 3 / 2 + 0.5)
    assert ramps_bound(slow, after=4) == pytest.approx(4 * 8 * 3 / 2 + 0.5 + 4, abs=0.1)


def two_large_units_each(**changes: object) -> Pieces:
    """Two devices that lack memory for the optimizer states of half a unit, of the two that each of them has."""
    unit = uniform(static=4, hosted=0, **changes)
    return Pieces((unit,) * 4, (6, 6), micro_batches=2, communication=0, bytes_per_second=1000)


def test_cpu_steps_follow_all_forwards_and_the_last_units_backwards() -> None:
    a = two_large_units_each(host_step=50)
    assert min_host_steps(a) == pytest.approx(50)
    assert ramps_bound(a) < 30
    # The last unit's first forward is the model's fourth.  Another one and two backwards for inputs follow.
    assert ramps_bound(a, host_steps=50) == pytest.approx(4 + 1 + 2 + 50)
    drained = replace(a, pieces=tuple(replace(piece, gradient_offload=2.0) for piece in a.pieces))
    assert ramps_bound(drained, host_steps=50) == pytest.approx(4 + 1 + 2 + 2 + 50)


def test_workspace_leaves_less_room_for_activations() -> None:
    def bound(limit: int, workspaces: Sequence[int]) -> float:
        units = tuple(
            Unit(
                type="layer", layer=None, forward=1, backward_input=1, backward_weight=1, static=0, workspace=workspace,
                strategies={"none": Strategy(2)},
            )
            for workspace in workspaces
        )  # fmt: skip
        model = Units(units=units, memory_limit=(limit,))
        problem = Problem(workload=ModelUnits(model), devices=2, micro_batches=8)
        return float(proven_bound(problem).time)

    # One device has the unit with 3; the other may have the one with 1 alone.
    assert bound(6, (1, 3, 3, 3)) == pytest.approx(bound(4, (0, 0, 0, 0)))
    assert bound(4, (0, 0, 0, 0)) > bound(6, (0, 0, 0, 0))


def random_stages(data: st.DataObject, stages: int) -> db.StageCosts:
    each = st.lists(st.integers(1, 4), min_size=stages, max_size=stages)
    return db.StageCosts.of(
        stages=stages,
        forward=data.draw(each),
        backward_input=data.draw(each),
        backward_weight=data.draw(each),
        recompute=data.draw(each),
        activation=4,
        activation_after_input=2,
        activation_recomputed=1,
        communication=data.draw(st.integers(0, 2)),
        offload=data.draw(st.sampled_from([None, 2, 5])),
        memory_limit=data.draw(st.sampled_from([4, 6, 8, 13])),
    )


@given(st.data())
@settings(max_examples=4)
def test_no_schedule_of_given_stages_beats_the_bound(data: st.DataObject) -> None:
    check_stages(data)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_schedule_of_many_given_stages_beats_the_bound(data: st.DataObject) -> None:
    check_stages(data)


def check_stages(data: st.DataObject) -> None:
    """The search of orders, which proves the optimum of problems as small as these, is never below the bound."""
    chunks = data.draw(st.integers(1, 2))
    costs = random_stages(data, 2 * chunks)
    problem = Problem(
        workload=FixedStages(costs), devices=2, chunks=chunks, micro_batches=data.draw(st.integers(1, 4)), effort=0.3
    )
    try:
        found = planners["optpipe"](problem)
    except InfeasibleError:
        return
    assert found.time >= proven_bound(problem).time


TAIL = StepTail(
    model=db.models["llama2-70b"], cluster=db.Cluster.parse("2xA100-80GB"), options=RunOptions(), pipeline=2
)
"""Some 0.8 s of optimizer: a good part of a unit's forward in these models."""


def units_of(data: st.DataObject) -> Units:
    host = data.draw(
        st.sampled_from([None, HostStates(static=1, gradients=1, parameters=1, step=data.draw(st.integers(1, 12)))])
    )
    large = data.draw(st.sampled_from([3, 6, 12]))
    units = tuple(
        Unit(
            type="layer", layer=None, forward=data.draw(st.integers(1, 4)), backward_input=data.draw(st.integers(1, 4)),
            backward_weight=data.draw(st.integers(1, 4)), static=(static := data.draw(st.sampled_from([3, large]))),
            states=StateBytes(weights=1, gradients=0, optimizer=static - 1), workspace=data.draw(st.integers(0, 2)),
            on_host=host, optimizer_step=data.draw(st.sampled_from([0, 0.1, 0.3])),
            strategies={"none": Strategy(4), "full": Strategy(1, data.draw(st.integers(1, 3)))},
        )
        for _ in range(data.draw(st.integers(4, 7)))
    )  # fmt: skip
    return Units(
        units=units,
        communication=data.draw(st.integers(0, 1)),
        offload_bandwidth=data.draw(st.sampled_from([1, 2, 4])),
        link_groups=data.draw(st.sampled_from([(), ((0, 1),)])),
        host_memory=data.draw(st.sampled_from([None, None, 30])),
        memory_limit=(data.draw(st.integers(10, 30)),),
    )


@pytest.mark.slow
@given(st.data())
@settings(max_examples=3)
def test_no_plan_of_a_model_beats_the_bound(data: st.DataObject) -> None:
    check_units(data)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_plan_of_many_models_beats_the_bound(data: st.DataObject) -> None:
    check_units(data)


def check_units(data: st.DataObject) -> None:
    problem = Problem(
        workload=ModelUnits(units_of(data)), devices=2, micro_batches=data.draw(st.integers(1, 6)), effort=0.2,
        chunks=data.draw(st.sampled_from([None, None, 1, 2])), tail=data.draw(st.sampled_from([None, TAIL])),
    )  # fmt: skip
    for name in ("joint", "chronos", "adapipe"):
        try:
            found = planners[name](problem)
        except DebubbleError:
            continue
        assert found.makespan >= proven_bound(problem).time
        assert found.time >= proven_step_bound(problem).time
        steps = longest_cpu_steps(found.solution)
        pieces = pieces_of_units(
            problem.units, capacities=[limit - float(problem.units.static) for limit in problem.limits],
            micro_batches=problem.micro_batches,
        )  # fmt: skip
        for finished in finished_units(pieces, longest=steps, min_step=0) if steps else ():
            assert found.makespan >= ramps_bound(pieces, finished=finished)


def longest_cpu_steps(solution: Solution) -> float:
    """The time of the CPU optimizer steps of the device with most of them."""
    hosted, step = solution.schedule.host_steps, solution.costs.host_step
    return max(float(sum(step[s] for s in own if s in hosted)) for own in solution.schedule.placement.stages_of)


def test_the_bound_says_what_it_counts() -> None:
    units = tuple(
        Unit(
            type="layer", layer=None, forward=1, backward_input=1, backward_weight=1, static=1,
            strategies={"none": Strategy(4)},
        )
        for _ in range(3)
    )  # fmt: skip
    even = Problem(workload=ModelUnits(Units(units=units)), devices=3, micro_batches=9)
    assert proven_bound(replace(even, objective="span")).argument == WORK_AND_PATH
    assert proven_bound(even).argument == GRANULAR
    assert float(proven_bound(even).time) == pytest.approx(27 + 2)
    odd = replace(even, devices=2)
    assert proven_bound(odd).argument == GRANULAR
    assert float(proven_bound(odd).time) == pytest.approx(54)
    stages = db.StageCosts.of(stages=4, memory_limit=1, recompute=8)
    tight = Problem(workload=FixedStages(stages), devices=4, micro_batches=8)
    assert proven_bound(tight).argument == RAMPS
    assert proven_bound(tight).time > lower_bound(tight)


@pytest.mark.parametrize(("capacity", "best", "bound"), [(3, 52, 40), (4, 41, 38)])
def test_two_chunks_in_a_v_with_little_memory_are_bounded(capacity: int, best: int, bound: int) -> None:
    """The best times are those of all orders, gone through moment by moment outside of this program."""
    costs = db.StageCosts.of(
        stages=6, activation=1, activation_after_input=1, activation_recomputed=1, memory_limit=capacity
    )
    problem = Problem(workload=FixedStages(costs), devices=3, chunks=2, micro_batches=6)
    assert bound < best
    assert float(proven_bound(problem).time) == pytest.approx(bound)


@st.composite
def hosted_pieces_in_little_room(draw: st.DrawFn) -> Pieces:
    """Pieces as above whose states fit on the hosts, and mostly not on the devices."""
    a = draw(hosted_pieces())
    more = draw(st.lists(st.integers(4, 9), min_size=len(a.pieces), max_size=len(a.pieces)))
    kinds = {
        piece: replace(piece, static=piece.hosted + 2 * m, host_step=m) for piece, m in zip(a.pieces, more, strict=True)
    }
    held = [piece.hosted for piece in a.pieces]
    transient = sum(max(getattr(piece, name) for piece in a.pieces) for name in ("workspace", "activation"))
    room = -(-sum(held) // len(a.capacities)) + max(held) + transient
    capacities = tuple(room + draw(st.integers(0, 3)) for _ in a.capacities)
    return replace(a, pieces=tuple(kinds[piece] for piece in a.pieces), capacities=capacities)


def least_number_of_all_ways(a: Pieces, like: Piece, longest: float) -> float:
    """The least number of such pieces that a device offloads, where no device's host steps longer than that."""
    least = inf
    for held in dealt_pieces(a):
        ways = [
            [hosted for hosted in ways_to_offload(own, size) if seconds_of(hosted) <= longest]
            for own, size in zip(held, a.capacities, strict=True)
        ]
        if all(ways):
            least = min(least, *(hosted.count(like) for each in ways for hosted in each))
    return least


@given(hosted_pieces_in_little_room(), st.integers(0, 8))
@settings(max_examples=60)
def test_every_device_offloads_some_units_in_all_ways(a: Pieces, more: int) -> None:
    assume(0 < min_host_steps(a) < inf)
    longest = round(min_host_steps(a)) + more
    found = {finished.places: finished.time for finished in finished_units(a, longest=longest, min_step=0)}
    for piece in {piece for piece in a.pieces if piece.host_step and a.pieces.count(piece) >= len(a.capacities)}:
        number = least_number_of_all_ways(a, piece, longest)
        places = tuple(n for n, other in enumerate(a.pieces) if other == piece)
        assert found.get(places, 0.0) == pytest.approx(number * piece.host_step, rel=1e-8)


def test_what_returns_after_the_last_forward_has_left_before() -> None:
    a = replace(two_large_units_each(host_step=40, strategies=((2, 0),)), micro_batches=16)
    slow, fast, small = (
        ramps_bound(each, host_steps=40) for each in (replace(a, bytes_per_second=0.5), a, replace(a, host_memory=10.0))
    )
    assert fast < min(slow, small)
