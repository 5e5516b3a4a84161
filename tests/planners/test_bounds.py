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
    """Three to seven pieces of at most three kinds, on one to three devices."""
    kinds = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=7))
    return Pieces(
        pieces=tuple(Piece(work, 0, 0, states, states, 0, 0, ((1, 0),)) for work, states in chosen),
        capacities=tuple(draw(st.lists(st.integers(4, 16), min_size=1, max_size=3))),
        micro_batches=draw(st.integers(1, 3)),
        communication=0,
        bytes_per_second=0,
    )


def best_assignment_time(a: Pieces, waits: Sequence[float]) -> float:
    """The shortest time in which all devices finish; each waits for its first forward."""
    devices = range(len(a.capacities))
    best = float("inf")
    for assignment in product(devices, repeat=len(a.pieces)):
        work, states = [0.0] * len(devices), [0.0] * len(devices)
        for device, piece in zip(assignment, a.pieces, strict=True):
            work[device] += piece.work
            states[device] += piece.hosted
        if all(state_bytes <= capacity for state_bytes, capacity in zip(states, a.capacities, strict=True)):
            best = min(best, max(wait + a.micro_batches * seconds for wait, seconds in zip(waits, work, strict=True)))
    return best


@given(pieces(), st.integers(0, 3))
@settings(max_examples=50)
def test_the_granular_bound_is_the_best_assignment_of_units(a: Pieces, communication: int) -> None:
    assert granular_bound(a) == pytest.approx(best_assignment_time(a, [0] * len(a.capacities)), rel=1e-8)
    # Devices wait for their first forward.
    a = replace(a, capacities=(a.capacities[0],) * len(a.capacities), communication=communication)
    waits = [k * communication + sum(piece.forward for piece in a.pieces[:k]) for k in range(len(a.capacities))]
    assert granular_bound(a, arrivals=True) == pytest.approx(best_assignment_time(a, waits), rel=1e-8)


@st.composite
def hosted_pieces(draw: st.DrawFn) -> Pieces:
    """Two to six pieces of at most three kinds, whose optimizer states hosts may take, on one to three devices."""
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


def ways_to_offload(local: Sequence[Piece], capacity: float) -> Iterator[list[Piece]]:
    """The sets of a device's pieces that may be offloaded so that the device's memory suffices."""
    transient = sum(max((getattr(p, name) for p in local), default=0) for name in ("workspace", "activation"))
    for chosen in product((False, True), repeat=len(local)):
        resident = [piece.hosted if hosted else piece.static for piece, hosted in zip(local, chosen, strict=True)]
        if sum(resident) + transient <= capacity:
            yield [piece for piece, hosted in zip(local, chosen, strict=True) if hosted]


def assignments(a: Pieces) -> Iterator[list[list[Piece]]]:
    """The pieces per device, for every assignment."""
    for owners in product(range(len(a.capacities)), repeat=len(a.pieces)):
        yield [
            [piece for piece, owner in zip(a.pieces, owners, strict=True) if owner == d]
            for d in range(len(a.capacities))
        ]


def host_seconds(hosted: Sequence[Piece]) -> float:
    return sum(piece.host_step for piece in hosted)


def min_steps_of_all_assignments(a: Pieces) -> float:
    """The minimum over assignments and offloaded states of the longest host steps of a device."""
    return min(
        max(
            min(map(host_seconds, ways_to_offload(local, size)), default=inf)
            for local, size in zip(assigned, a.capacities, strict=True)
        )
        for assigned in assignments(a)
    )


@given(hosted_pieces())
@settings(max_examples=60)
def test_host_steps_are_the_minimum_over_assignments(a: Pieces) -> None:
    assume(any(piece.host_step for piece in a.pieces))
    assert min_host_steps(a) == pytest.approx(min_steps_of_all_assignments(a), rel=1e-8)


def best_partition(a: Pieces, chunks: int) -> float:
    """The shortest time in which all devices finish, over all cuts into `chunks` stages per device."""
    best = float("inf")
    number = len(a.capacities) * chunks
    for inner in combinations(range(1, len(a.pieces)), number - 1):
        stages = [a.pieces[begin:end] for begin, end in pairwise((0, *inner, len(a.pieces)))]
        for device_of in product(range(len(a.capacities)), repeat=number):
            stages_of = [[n for n, device in enumerate(device_of) if device == d] for d in range(len(a.capacities))]
            if any(len(ids) != chunks for ids in stages_of):
                continue
            if any(sum(p.hosted for n in ids for p in stages[n]) > a.capacities[d] for d, ids in enumerate(stages_of)):
                continue
            messages = [sum(a != b for a, b in pairwise(device_of[: ids[0] + 1])) for ids in stages_of]
            before = [
                a.communication * sent + sum(p.forward for stage in stages[: ids[0]] for p in stage)
                for sent, ids in zip(messages, stages_of, strict=True)
            ]
            works = [sum(p.work for n in ids for p in stages[n]) for ids in stages_of]
            times = [wait + a.micro_batches * work for wait, work in zip(before, works, strict=True)]
            best = min(best, max(times))
    return best


@given(pieces(), st.integers(1, 2), st.sampled_from([0, 1, 100]))
@settings(max_examples=80)
def test_no_partition_beats_the_contiguous_bound(a: Pieces, chunks: int, communication: int) -> None:
    a = replace(a, capacities=(a.capacities[0],) * len(a.capacities), communication=communication)
    if len(a.pieces) < len(a.capacities) * chunks:
        return
    granular = granular_bound(a, arrivals=True)
    bound = contiguous_bound(a, chunks=(chunks,), known_bound=granular, arrivals=True)
    assert granular * (1 - 1e-8) <= bound <= best_partition(a, chunks) * (1 + 1e-8)


def halves_and_head(layers: int) -> tuple[Unit, ...]:
    """Layers of an attention with work 5 and an MLP with work 7, and a head with work 4."""
    works = [5, 7] * layers + [4]
    return tuple(
        Unit(
            type="layer", layer=None, forward=0, backward_input=0, backward_weight=work, static=0,
            strategies={"none": Strategy(0)},
        )
        for work in works
    )  # fmt: skip


def test_three_contiguous_stages_raise_the_bound() -> None:
    problem = Problem(workload=ModelUnits(Units(units=halves_and_head(6))), devices=4, micro_batches=10)
    # Assigned freely, a device takes 19, one of them three attentions and the head.  In three contiguous stages, the
    # head's device has three halves with at least one MLP, or another device has four halves with at least one MLP.
    assert float(proven_bound(problem).time) == pytest.approx(10 * 19)
    three = replace(problem, chunks=3)
    assert proven_bound(three).argument == CONTIGUOUS
    assert float(proven_bound(three).time) == pytest.approx(10 * min(5 + 5 + 7 + 4, 5 + 5 + 5 + 7))


def uniform(**changes: object) -> Piece:
    piece = Piece(1, 1, 1, 0, 0, 0, 1, ((2, 0), (1, 1)))
    return replace(piece, **changes)  # type: ignore[arg-type]


def test_the_ramps_bound_counts_idle_time_for_short_memory() -> None:
    a = Pieces((uniform(strategies=((2, 0),)),) * 4, (4, 4), micro_batches=8, communication=0, bytes_per_second=0)
    # Only four activations fit at a time: four of the 8 forwards, and 4 x 2 of the 2 x 5 operations of the last ramp.
    assert ramps_bound(a) == pytest.approx((4 * 8 * 3 + (8 - 4) + (10 - 8)) / 2)
    assert ramps_bound(replace(a, bytes_per_second=10.0)) < ramps_bound(a)


def test_the_optimizer_takes_time_in_or_after_the_pipeline() -> None:
    units = (uniform(optimizer=2.0),) * 4
    a = Pieces(units, (100, 100), micro_batches=8, communication=0, bytes_per_second=0)
    # Device 1 begins at least one forward of a unit later.
    assert ramps_bound(a) == pytest.approx(4 * 8 * 3 / 2 + 0.5)
    assert ramps_bound(a, after=4) == pytest.approx(4 * 8 * 3 / 2 + 0.5 + 4)
    assert ramps_bound(a, after=1) == pytest.approx(4 * 8 * 3 / 2 + 0.5 + 1)
    assert ramps_bound(a, known_bound=60, after=4) == pytest.approx(60)
    # Hosts step after last gradients: fast ones during other computation, slow ones beyond the end of the pipeline.
    fast, slow = (
        replace(a, pieces=(uniform(optimizer=2.0, static=1, hosted=0, host_step=step),) * 4) for step in (5, 5000)
    )
    assert ramps_bound(fast, after=4) == pytest.approx(4 * 8 * 3 / 2 + 0.5)
    assert ramps_bound(slow, after=4) == pytest.approx(4 * 8 * 3 / 2 + 0.5 + 4, abs=0.1)


def two_large_units_per_device(**changes: object) -> Pieces:
    """Two devices with two units each and memory for the optimizer states of one and a half."""
    unit = uniform(static=4, hosted=0, **changes)
    return Pieces((unit,) * 4, (6, 6), micro_batches=2, communication=0, bytes_per_second=1000)


def test_cpu_steps_follow_forwards_and_the_last_backwards() -> None:
    a = two_large_units_per_device(host_step=50)
    assert min_host_steps(a) == pytest.approx(50)
    assert ramps_bound(a) < 30
    # The last unit's first forward is the model's fourth; one more forward and two input backwards follow.
    assert ramps_bound(a, host_steps=50) == pytest.approx(4 + 1 + 2 + 50)
    drained = replace(a, pieces=tuple(replace(piece, gradient_offload=2.0) for piece in a.pieces))
    assert ramps_bound(drained, host_steps=50) == pytest.approx(4 + 1 + 2 + 2 + 50)


def test_workspace_leaves_less_memory_for_activations() -> None:
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

    # One device has a unit with a workspace of 3; the other may have only the unit with 1.
    assert bound(6, (1, 3, 3, 3)) == pytest.approx(bound(4, (0, 0, 0, 0)))
    assert bound(4, (0, 0, 0, 0)) > bound(6, (0, 0, 0, 0))


def random_stages(data: st.DataObject, stages: int) -> db.StageCosts:
    times = st.lists(st.integers(1, 4), min_size=stages, max_size=stages)
    return db.StageCosts.of(
        stages=stages,
        forward=data.draw(times),
        backward_input=data.draw(times),
        backward_weight=data.draw(times),
        recompute=data.draw(times),
        activation=4,
        activation_after_input=2,
        activation_recomputed=1,
        communication=data.draw(st.integers(0, 2)),
        offload=data.draw(st.sampled_from([None, 2, 5])),
        memory_limit=data.draw(st.sampled_from([4, 6, 8, 13])),
    )


@given(st.data())
@settings(max_examples=4)
def test_no_schedule_of_fixed_stages_beats_the_bound(data: st.DataObject) -> None:
    check_stages(data)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_schedule_of_many_fixed_stages_beats_the_bound(data: st.DataObject) -> None:
    check_stages(data)


def check_stages(data: st.DataObject) -> None:
    """The order search, which proves the optimum of such small problems, is never below the bound."""
    chunks = data.draw(st.integers(1, 2))
    costs = random_stages(data, 2 * chunks)
    problem = Problem(
        workload=FixedStages(costs), devices=2, chunks=chunks, micro_batches=data.draw(st.integers(1, 4)), effort=0.3
    )
    try:
        result = planners["optpipe"](problem)
    except InfeasibleError:
        return
    assert result.time >= proven_bound(problem).time


TAIL = StepTail(
    model=db.models["llama2-70b"], cluster=db.Cluster.parse("2xA100-80GB"), options=RunOptions(), pipeline=2
)
"""About 0.8 s of optimizer: much of a unit's forward in these models."""


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
            result = planners[name](problem)
        except DebubbleError:
            continue
        assert result.makespan >= proven_bound(problem).time
        assert result.time >= proven_step_bound(problem).time
        steps = longest_cpu_steps(result.solution)
        pieces = pieces_of_units(
            problem.units, capacities=[limit - float(problem.units.static) for limit in problem.limits],
            micro_batches=problem.micro_batches,
        )  # fmt: skip
        for finished in finished_units(pieces, longest=steps, min_step=0) if steps else ():
            assert result.makespan >= ramps_bound(pieces, finished=finished)


def longest_cpu_steps(solution: Solution) -> float:
    """The longest CPU optimizer steps of a device."""
    hosted, step = solution.schedule.host_steps, solution.costs.host_step
    return max(float(sum(step[s] for s in local if s in hosted)) for local in solution.schedule.placement.stages_of)


def test_the_bound_names_its_argument() -> None:
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
def test_the_bound_of_a_v_shape_with_short_memory(capacity: int, best: int, bound: int) -> None:
    """The best times are from an exhaustive search outside of this program."""
    costs = db.StageCosts.of(
        stages=6, activation=1, activation_after_input=1, activation_recomputed=1, memory_limit=capacity
    )
    problem = Problem(workload=FixedStages(costs), devices=3, chunks=2, micro_batches=6)
    assert bound < best
    assert float(proven_bound(problem).time) == pytest.approx(bound)


@st.composite
def hosted_pieces_with_short_memory(draw: st.DrawFn) -> Pieces:
    """Pieces whose states fit on the hosts, and mostly not on the devices."""
    a = draw(hosted_pieces())
    steps = draw(st.lists(st.integers(4, 9), min_size=len(a.pieces), max_size=len(a.pieces)))
    kinds = {
        piece: replace(piece, static=piece.hosted + 2 * step, host_step=step)
        for piece, step in zip(a.pieces, steps, strict=True)
    }
    resident = [piece.hosted for piece in a.pieces]
    transient = sum(max(getattr(piece, name) for piece in a.pieces) for name in ("workspace", "activation"))
    capacity = -(-sum(resident) // len(a.capacities)) + max(resident) + transient
    capacities = tuple(capacity + draw(st.integers(0, 3)) for _ in a.capacities)
    return replace(a, pieces=tuple(kinds[piece] for piece in a.pieces), capacities=capacities)


def min_offloaded_of_all_assignments(a: Pieces, like: Piece, longest: float) -> float:
    """The minimum number of pieces equal to `like` on a device's host, if no host steps for more than `longest`."""
    minimum = inf
    for assigned in assignments(a):
        ways = [
            [hosted for hosted in ways_to_offload(local, size) if host_seconds(hosted) <= longest]
            for local, size in zip(assigned, a.capacities, strict=True)
        ]
        if all(ways):
            minimum = min(minimum, *(hosted.count(like) for sets in ways for hosted in sets))
    return minimum


@given(hosted_pieces_with_short_memory(), st.integers(0, 8))
@settings(max_examples=60)
def test_finished_units_are_the_minimum_over_assignments(a: Pieces, more: int) -> None:
    assume(0 < min_host_steps(a) < inf)
    longest = round(min_host_steps(a)) + more
    times = {finished.places: finished.time for finished in finished_units(a, longest=longest, min_step=0)}
    for piece in {piece for piece in a.pieces if piece.host_step and a.pieces.count(piece) >= len(a.capacities)}:
        number = min_offloaded_of_all_assignments(a, piece, longest)
        places = tuple(n for n, other in enumerate(a.pieces) if other == piece)
        assert times.get(places, 0.0) == pytest.approx(number * piece.host_step, rel=1e-8)


def test_offload_before_the_last_forward_raises_the_bound() -> None:
    a = replace(two_large_units_per_device(host_step=40, strategies=((2, 0),)), micro_batches=16)
    slow, fast, small = (
        ramps_bound(b, host_steps=40) for b in (replace(a, bytes_per_second=0.5), a, replace(a, host_memory=10.0))
    )
    assert fast < min(slow, small)
