from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs import Strategy, Unit, Units
from debubble.costs.unit import HostStates
from debubble.ir import InfeasibleError, Placement, RunOptions
from debubble.planners import planners
from debubble.planners.joint.annealing_kernel import QUARTERS, UNLIMITED
from debubble.planners.joint.chain import PointChain
from debubble.planners.joint.levers import Levers, Point, policy_choices
from debubble.planners.joint.list_scheduling.scheduler import place, schedule
from debubble.planners.joint.list_scheduling.stage_table import AHEAD
from debubble.planners.joint.refinement import refine
from debubble.planners.model_problem import problem_of as problem_of_model
from debubble.planners.problem import FixedStages, ModelUnits, Problem, Solution
from debubble.search.effort import Effort

STRATEGIES = {"none": Strategy(8), "cheap": Strategy(5, 0.25), "dear": Strategy(4, 2), "full": Strategy(1, 1)}


def layer(forward: float, **changes: object) -> Unit:
    unit = Unit(
        type="layer", layer=None, forward=forward, backward_input=forward, backward_weight=forward, static=3,
        strategies=STRATEGIES, activation_after_input=3, workspace=1,
    )  # fmt: skip
    return replace(unit, **changes)  # type: ignore[arg-type]


def problem_of(
    *, limit: float | None = None, micro_batches: int = 6, devices: int = 3, forwards: tuple[float, ...] = (1.0,) * 12,
    bandwidth: float | None = 8, link_groups: tuple[tuple[int, ...], ...] = (), effort: float = 1.0,
    scales: tuple[float, ...] | None = None,
) -> Problem:  # fmt: skip
    units = Units(
        units=tuple(layer(forward) for forward in forwards),
        communication=0.25,
        offload_bandwidth=bandwidth,
        link_groups=link_groups,
        memory_limit=None if limit is None else (limit,),
        micro_batch_scale=scales,
    )
    return Problem(workload=ModelUnits(units), devices=devices, micro_batches=micro_batches, effort=effort)


def drawn(levers: Levers, seed: int) -> PointChain:
    """A chain at its first random point."""
    chain = PointChain(levers, seed)
    chain.draw(Effort(0))
    return chain


def levers_of(problem: Problem, placement: Placement) -> Levers:
    assert isinstance(problem.workload, ModelUnits)
    return Levers(problem, problem.workload.units, placement)


def test_a_points_score_includes_the_optimizer_step() -> None:
    model, cluster = db.models["llama3-8b"], db.Cluster.parse("4xL40S-48GB")
    problem = problem_of_model(model, cluster, RunOptions(sequence_length=4096), micro_batches=4)
    assert isinstance(problem.workload, ModelUnits)
    units = replace(problem.workload.units, offload_bandwidth=None)
    levers = Levers(problem, units, Placement.v_shape(4, 2))
    chain = PointChain(levers, 0)
    chain.draw(Effort(0.1))
    solution = levers.solution(chain.best)
    time = float(problem.step_time(db.simulate(solution.schedule, solution.costs)))
    assert chain.best_score == pytest.approx(time, rel=1e-12)
    assert time > float(db.simulate(solution.schedule, solution.costs).makespan)


def test_only_two_stages_of_a_device_are_gathered_at_a_time() -> None:
    model, cluster = db.models["llama3-8b"], db.Cluster.parse("8xL40S-48GB")
    options = RunOptions(sequence_length=4096, data=2, zero=3)
    problem = problem_of_model(model, cluster, options, micro_batches=4)
    assert isinstance(problem.workload, ModelUnits)
    levers = Levers(problem, problem.workload.units, Placement.v_shape(4, 4))
    point = drawn(levers, 0).best
    costs = levers.solution(point).costs
    assert any(costs.gathered)
    free = [limit - float(costs.static_of(device)) for device, limit in enumerate(problem.limits)]
    assert levers.table(point)[0].capacity == pytest.approx(free, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"data": 2, "zero": 1}, {"data": 2, "zero": 2}, {"tensor": 2}, {"lora": 16}, {"optimizer": "adamw-8bit"},
        {"master_dtype": "bf16"}, {"framework": "megatron-lm"}, {"host_optimizer": 1.0, "data": 2, "zero": 1},
        {"data": 2, "zero": 2, "framework": "torchtitan"}, {"data": 2, "zero": 1, "framework": "deepspeed"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("model", "cluster"), [("llama2-13b", "8xA100-80GB"), ("qwen3-30b-a3b", "16xH100-80GB")])
def test_a_points_score_is_the_simulated_step(model: str, cluster: str, options: dict[str, Any], chunks: int) -> None:
    score, step = score_and_step(model, cluster, options, chunks)
    assert score == pytest.approx(step, rel=1e-9)


@pytest.mark.parametrize("options", [{"data": 2, "zero": 3}, {"context": 2, "zero": 3}], ids=str)
def test_a_points_score_counts_waits_for_gathers(options: dict[str, Any]) -> None:
    # The simulator also makes a reload wait for parameters to be freed.
    score, step = score_and_step("qwen3-30b-a3b", "16xH100-80GB", options, 4)
    assert score == pytest.approx(step, rel=0.03)


def score_and_step(model: str, cluster: str, options: dict[str, Any], chunks: int) -> tuple[float, float]:
    """The score of the best of some random points, and its simulated step."""
    run = RunOptions(sequence_length=4096, **options)
    problem = problem_of_model(db.models[model], db.Cluster.parse(cluster), run, micro_batches=16)
    assert isinstance(problem.workload, ModelUnits)
    levers = Levers(problem, problem.workload.units, Placement.v_shape(problem.devices, chunks))
    chain = PointChain(levers, 0)
    chain.draw(Effort(0.4))
    assert chain.complete
    return chain.best_score, float(problem.step_time(levers.solution(chain.best).simulate()))


def test_a_model_with_one_very_large_unit_is_planned() -> None:
    """A large vocabulary makes the head large, and the stages of layers long."""
    none = {"none": Strategy(activation=1)}
    layer = Unit(type="layer", layer=None, forward=1, backward_input=1, backward_weight=1, static=1, strategies=none)
    head = replace(layer, type="head", forward=200, backward_input=200, backward_weight=200)
    units = Units(units=(*(layer,) * 50, head))
    result = planners["joint"](Problem(devices=4, micro_batches=4, workload=ModelUnits(units), effort=0.1))
    assert result.time >= 4 * 600


def test_devices_with_several_stages_are_balanced() -> None:
    forwards = (1.0,) * 11 + (4.0,)
    levers = levers_of(problem_of(forwards=forwards), Placement.v_shape(3, 2))
    work = np.zeros(3)
    for stage, device in zip(levers.partition(drawn(levers, 0).best), (0, 1, 2, 2, 1, 0), strict=True):
        work[device] += 3 * sum(forwards[index] for index, _ in stage)
    assert work.tolist() == [15, 15, 15]


def test_levels_of_recomputation_follow_the_price_of_a_byte() -> None:
    levers = levers_of(problem_of(), Placement.looped(3))
    point: Point = drawn(levers, 0).best
    names = [
        {name for stage in levers.partition(replace(point, levels=(level,) * 3)) for _, name in stage}
        for level in range(levers.levels)
    ]
    # `dear` keeps less than `cheap` for more time than `full`, which keeps less still.
    assert names == [{"none"}, {"cheap"}, {"full"}]


def test_memory_for_states_and_one_activation_is_too_little() -> None:
    with pytest.raises(InfeasibleError, match=r"No plan of those that were tried fits the memory limit\.$"):
        planners["joint"](problem_of(limit=14, effort=0.2))


def test_fixed_stages_are_refused_in_favor_of_optpipe() -> None:
    problem = Problem(workload=FixedStages(db.StageCosts.of(stages=3)), devices=3, micro_batches=4)
    with pytest.raises(InfeasibleError, match="`optpipe`"):
        planners["joint"](problem)


@pytest.mark.parametrize("limit", [60, 200])
def test_joint_is_as_fast_as_planners_with_fewer_levers(limit: float) -> None:
    problem = problem_of(limit=limit, micro_batches=8, effort=2)
    best = planners["joint"](problem)
    assert max(best.timeline.peak_memory) <= limit
    for name in ("dapple", "dapple+", "adapipe", "megatron-even"):
        try:
            other = planners[name](problem)
        except InfeasibleError:
            continue
        assert best.time <= other.time


def test_the_same_seed_gives_the_same_plan() -> None:
    problem = problem_of(limit=70)
    assert planners["joint"](problem).solution.schedule == planners["joint"](problem).solution.schedule


@pytest.mark.parametrize("link_groups", [(), ((0, 1, 2),)])
def test_every_answer_has_the_timeline_of_its_order_and_costs(link_groups: tuple[tuple[int, ...], ...]) -> None:
    problem = problem_of(limit=70, link_groups=link_groups)
    solutions = list(planners["joint"].solutions(problem))
    for solution in solutions:
        known, simulated = solution.timeline, db.simulate(solution.schedule, solution.costs)
        assert known is not None
        assert known.program.costs is solution.costs
        assert (known.start.tolist(), known.end.tolist()) == (simulated.start.tolist(), simulated.end.tolist())
        assert known.peak_memory == simulated.peak_memory
    assert solutions


@pytest.mark.slow
def test_one_device_has_several_stages_only_if_memory_is_short() -> None:
    ample, short = (planners["joint"](problem_of(devices=1, limit=limit)) for limit in (200, 90))
    assert (ample.time, ample.solution.schedule.stages) == (216, 1)
    assert short.time == 216 < planners["joint"](replace(problem_of(devices=1, limit=90), chunks=1)).time


@pytest.mark.slow
def test_some_micro_batches_recompute_deeper_if_faster() -> None:
    problem = replace(problem_of(limit=70, micro_batches=8, bandwidth=None), chunks=2, deadline=1e6)
    assert isinstance(problem.workload, ModelUnits)
    units = problem.workload.units
    solution = planners["joint"](problem).solution
    schedule, partition, deeper = solution.schedule, solution.partition, solution.deeper
    assert partition is not None
    assert deeper is not None
    assert schedule.deeper
    costs, deep = (units.stage_costs(stages, schedule.placement) for stages in (partition, deeper))
    assert solution.costs == costs.replace(
        recompute_deeper=deep.recompute, activation_deeper=deep.activation_recomputed
    )
    planned = units.planned(partition, deeper)
    strategies = [[[unit.strategies[level] for unit in stage] for stage in planned] for level in range(2)]
    assert strategies == [[[name for _, name in stage] for stage in stages] for stages in (partition, deeper)]


@pytest.mark.slow
def test_one_device_offloads_activations_chunk_by_chunk() -> None:
    model, cluster = db.models["qwen2.5-7b"], db.Cluster.parse("1xRTX4090-24GB")
    result = planners["joint"](problem_of_model(model, cluster, RunOptions(lora=16), micro_batches=8, effort=0.5))
    assert result.solution.schedule.placement.chunks > 1
    assert result.gap < 0.03


UNITS = 24
SCALES = (0.25, 0.5, 1.0)


@st.composite
def models(draw: st.DrawFn, devices: int, *, integers: bool) -> Units:
    """Models with links to the host, whose times and sizes are whole numbers if `integers`."""
    numbers = st.integers(1, 6).map(float) if integers else st.floats(0.5, 6)
    activation, stepped = draw(numbers), draw(st.booleans())
    host = HostStates(static=1, gradients=draw(numbers), parameters=draw(numbers), step=draw(numbers))
    recompute = draw(numbers)

    def unit(forward: float) -> Unit:
        return Unit(
            type="layer", layer=None, forward=forward, backward_input=draw(numbers), backward_weight=draw(numbers),
            static=3, activation_after_input=draw(st.sampled_from([0.5, 1.0])) * activation, workspace=1,
            strategies={
                "none": Strategy(8 * activation),
                "some": Strategy(4 * activation, recompute / 2),
                "full": Strategy(activation, recompute),
            },
            on_host=host if stepped else None,
        )  # fmt: skip

    size = draw(st.sampled_from([1, 2, 4, devices]))
    groups = [tuple(range(first, min(first + size, devices))) for first in range(0, devices, size)]
    equal_units = draw(st.booleans())
    units = [unit(draw(numbers))] * UNITS if equal_units else [unit(draw(numbers)) for _ in range(UNITS)]
    m = draw(st.integers(1, 8))
    return Units(
        units=tuple(units),
        communication=draw(st.sampled_from([0.0, 1.0]) if integers else st.floats(0, 1)),
        communication_within_node=draw(st.sampled_from([None, 0.0])),
        devices_per_node=draw(st.integers(1, 3)),
        offload_bandwidth=draw(st.sampled_from([1.0, 4.0, 16.0]) if integers else st.floats(1, 16)),
        host_link=draw(st.sampled_from(["full-duplex", "half-duplex"])),
        link_groups=() if size == 1 else tuple(groups),
        memory_limit=draw(st.none() | st.integers(100, 1500).map(lambda limit: (float(limit),))),
        micro_batch_scale=(1.0,) * m if draw(st.booleans()) else tuple(draw(st.sampled_from(SCALES)) for _ in range(m)),
    )


@st.composite
def points(draw: st.DrawFn, stages: int, levels: int, *, hostable: bool) -> Point:
    """Points with any choices for stages of equally many units."""

    def per_stage(choices: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(choices, min_size=stages, max_size=stages)))

    return Point(
        counts=tuple(UNITS // stages + (s < UNITS % stages) for s in range(stages)),
        levels=per_stage(st.integers(0, levels - 1)),
        shares=per_stage(st.integers(0, QUARTERS)),
        max_in_flight=per_stage(st.just(UNLIMITED) | st.integers(1, 4)),
        hosted=tuple(n > 0 for n in per_stage(st.integers(0, 1 if hostable else 0))),
        policy=tuple(
            draw(st.sampled_from([*choices])) for choices in policy_choices(stages, first=range(4) if hostable else ())
        ),
    )


@pytest.mark.parametrize("integers", [True, False])
@settings(max_examples=40)
@given(data=st.data())
def test_a_list_schedule_fits_and_has_the_simulated_time(integers: bool, data: st.DataObject) -> None:
    devices = data.draw(st.integers(1, 5))
    make = data.draw(st.sampled_from([Placement.looped, Placement.v_shape]))
    placement = make(devices, data.draw(st.integers(1, min(6, UNITS // devices))))
    units = data.draw(models(devices, integers=integers))
    assert units.micro_batch_scale is not None
    problem = Problem(workload=ModelUnits(units), devices=devices, micro_batches=len(units.micro_batch_scale))
    levers = Levers(problem, units, placement)
    point = data.draw(points(placement.stages, levers.levels, hostable=units.hostable))
    table, lacking = levers.table(point)
    scheduled = schedule(table, levers.scales, np.array(point.policy), np.array(point.max_in_flight))
    assume(not lacking and not scheduled.missing)
    solution = levers.solution(point)
    timeline = db.simulate(solution.schedule, solution.costs)
    assert scheduled.makespan == pytest.approx(float(timeline.makespan), rel=1e-9)
    assert units.memory_limit is None or max(timeline.peak_memory) <= units.memory_limit[0] * (1 + 1e-12)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    make = draw(st.sampled_from([Placement.looped, Placement.v_shape]))
    return make(3, draw(st.integers(1, 4)))


def test_a_device_recomputes_while_it_waits_for_a_gradient() -> None:
    problem = problem_of(bandwidth=None, micro_batches=1)
    levers = levers_of(problem, Placement.linear(3))
    point = replace(drawn(levers, 0).best, levels=(levers.levels - 1,) * 3)
    table, _ = levers.table(point)
    policy, max_in_flight = np.array(point.policy), np.array(point.max_in_flight)
    times = []
    for ahead in (0, 1):
        policy[AHEAD] = ahead
        times.append(schedule(table, levers.scales, policy, max_in_flight).makespan)
    # The last stage has its gradient at once; the other two recompute their four units of 1 while they wait.
    assert times[0] - times[1] == 8


@settings(max_examples=30)
@given(placements(), st.integers(0, 10**6), st.integers(60, 200), st.floats(0.5, 2))
def test_a_list_schedule_is_cut_off_only_above_its_limit(
    placement: Placement, seed: int, limit: int, fraction: float
) -> None:
    levers = levers_of(problem_of(limit=limit), placement)
    point = drawn(levers, seed).best
    table, _ = levers.table(point)
    policy, max_in_flight = np.array(point.policy), np.array(point.max_in_flight)
    scheduled = schedule(table, levers.scales, policy, max_in_flight)
    if scheduled.missing:
        return
    nothing = np.empty((0, 3), dtype=np.int64), np.empty(0)
    _, time, _ = place(*table, levers.scales, policy, max_in_flight, fraction * scheduled.makespan, np.inf, *nothing)
    assert time in (scheduled.makespan, np.inf)
    assert time == scheduled.makespan or fraction < 1


def test_units_stop_recomputing_if_that_is_faster_and_fits() -> None:
    problem = problem_of(bandwidth=None)
    levers = levers_of(problem, Placement.linear(3))
    point = drawn(levers, 0).best
    slow, fast = (levers.solution(replace(point, levels=(level,) * 3)) for level in (levers.levels - 1, 0))

    def time_of(solution: Solution) -> float:
        return float(db.simulate(solution.schedule, solution.costs).makespan)

    assert time_of(refine(levers.units, time_of, slow, Effort(10))) < time_of(slow)
    assert refine(levers.units, time_of, fast, Effort(10)) is fast
    assert refine(levers.units, time_of, slow, Effort(0)) is slow
