from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import debubble as db
from debubble.ir import CutOffError, DebubbleError, RunOptions
from debubble.ir.degrees import Degrees
from debubble.planners import planners
from debubble.planners.degrees.answer import MAX_SHOWN
from debubble.planners.degrees.estimate import quick_bound, quick_step, step_bound
from debubble.planners.degrees.memory import too_large
from debubble.planners.degrees.search import quickest, search_degrees
from debubble.planners.degrees.space import Job, configurations, ordinary_choices
from debubble.planners.problem import Problem, Solution
from debubble.planners.progress import Improvement, Progress, progress_listener
from debubble.planners.registry import verify

TINY = db.models["llama-tiny"]


def job(model: str = "llama-tiny", cluster: str = "4xA100-80GB", *, batch: int = 8, **options: Any) -> Job:
    return Job(
        model=db.models[model], cluster=db.Cluster.parse(cluster), global_batch=batch, effort=1.0,
        options=RunOptions(**{"sequence_length": 128, **options}),
    )  # fmt: skip


def steps(asked: Job, *, every: int = 1) -> dict[Degrees, float]:
    """The quick plan's step of every choice that fits, or of one in `every` choices."""
    result = {}
    for degrees in configurations(asked)[::every]:
        try:
            result[degrees] = quick_step(asked.problem(degrees))[0]
        except DebubbleError:
            continue
    return result


def test_the_first_configuration_is_the_plan() -> None:
    plan = db.plan(TINY, db.Cluster.parse("4xA100-80GB"), global_batch=8, sequence_length=128, planner="merak")
    assert plan.degree_search is not None
    first, *slower = plan.degree_search.configurations
    assert first.degrees == plan.degrees
    assert plan.degrees.global_batch == 8
    assert first.peak_memory == pytest.approx(max(map(float, plan.simulate().peak_memory)))
    assert first.memory.total == pytest.approx(first.peak_memory)
    assert [first.step_time, *(o.step_time for o in slower)] == sorted(
        c.step_time for c in plan.degree_search.configurations
    )
    assert first.tokens_per_second_per_device == pytest.approx(8 * 128 / first.step_time / 4)


def test_choices_that_the_planner_refuses_count_once() -> None:
    reports: list[Progress] = []
    with pytest.raises(DebubbleError, match="'adaoffload' has no plan for the choices of degrees that fit"):
        search_degrees(replace(job(), fixed={"chunks": 2}), planner="adaoffload", progress=reports.append)
    assert max(report.done for report in reports) == reports[0].total


@pytest.mark.parametrize("planner", ["dapple", "pipeoffload"])
def test_no_count_of_choices_exceeds_their_total(planner: str) -> None:
    """These planners refuse choices that had been excluded as slower."""
    reports: list[Progress] = []
    asked = job("llama2-13b", "4xA100-80GB", sequence_length=4096, dtype="bf16")
    search = search_degrees(replace(asked, effort=0.3), planner=planner, progress=reports.append).search
    assert all(report.done <= report.total for report in reports)
    assert (reports[-1].stage, reports[-1].done) == ("Planning the best", search.legal)
    assert search.too_large + search.slower + search.planned == search.legal


def test_the_bounds_are_below_the_step_of_every_quick_plan() -> None:
    asked = job("llama3-8b", "16xH100-80GB", batch=32, sequence_length=8192, dtype="bf16")
    some = list(steps(asked, every=36).items())
    assert len(some) > 2
    for degrees, step in some:
        problem = asked.problem(degrees)
        assert step_bound(problem) <= step * (1 + 1e-12)
        assert quick_bound(problem) <= step


def test_choices_that_are_too_large_fit_with_no_planner() -> None:
    asked = job("llama3-8b", "4xA100-40GB", batch=8, sequence_length=4096)
    refused = [degrees for degrees in configurations(asked) if too_large(asked.problem(degrees))]
    assert refused
    for degrees in refused[::7]:
        problem = replace(asked.problem(degrees), effort=0.1)
        for name in ("adapipe", "pipeoffload", "chronos", "merak"):
            with pytest.raises(DebubbleError):
                planners[name](problem)


def test_ctrl_c_keeps_the_best_so_far() -> None:
    reports: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        reports.append(progress)
        if progress.best is not None:
            raise KeyboardInterrupt

    best = search_degrees(job(), progress=interrupt)
    assert best.search.interrupted
    assert best.degrees == reports[-1].best
    assert float(best.result.time) == pytest.approx(reports[-1].step_time)


def test_ctrl_c_while_one_choice_is_planned_ends_the_search() -> None:
    def interrupt(news: Progress | Improvement) -> None:
        if isinstance(news, Improvement) and news.planner != "quick plan":
            raise KeyboardInterrupt

    with progress_listener(interrupt):
        best = search_degrees(job())

    assert best.search.interrupted


def interrupt_at_once(_: Progress) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_anything_fits_is_raised() -> None:
    tight = replace(job(), cluster=db.Cluster.parse("4xA100-80GB").with_limit("1MiB"))
    with pytest.raises(KeyboardInterrupt):
        search_degrees(tight, progress=interrupt_at_once)


def test_the_first_quick_plan_is_the_answer_after_the_deadline() -> None:
    best = search_degrees(replace(job(), deadline=1e-9))
    assert best.result.planner == "quick plan"
    assert (best.search.planned, len(best.search.configurations)) == (1, 1)


def test_ordinary_choices_are_planned_before_all_are_listed() -> None:
    best = search_degrees(job(), progress=interrupt_at_once)
    assert best.search.interrupted
    assert (best.search.planned, best.result.planner) == (3, "quick plan")
    assert best.degrees in ordinary_choices(job())


def test_the_quick_plan_takes_chunks_while_they_are_faster() -> None:
    asked = job("llama2-13b", "8xA100-80GB", batch=16, sequence_length=2048)
    problem = asked.problem(Degrees(pipeline=8, micro_batches=16))
    step, plan = quick_step(problem)
    assert plan.schedule.placement.chunks > 2
    assert step < quick_step(replace(problem, chunks=2))[0]


def slow(*arguments: Any, **options: Any) -> Any:
    return pytest.param(partial(job, *arguments, **options), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "make_job",
    [
        partial(job, batch=4),
        slow(cluster="2xH100-80GB+2xA100-80GB", batch=4),
        slow("llama3-8b", "16xH100-80GB", batch=64, sequence_length=8192),
        slow("llama2-13b", "8xA100-40GB", batch=32, sequence_length=4096),
        slow("mixtral-8x7b", "16xH100-80GB", batch=32, sequence_length=4096),
    ],
)
def test_no_pruned_choice_is_better(make_job: Any) -> None:
    asked = make_job()
    best = quickest(replace(asked, effort=1e3)).search
    assert best.slower > best.planned
    exhaustive = sorted(set(steps(asked).values()))[:MAX_SHOWN]
    assert [configuration.step_time for configuration in best.configurations] == pytest.approx(exhaustive)


@pytest.mark.slow
def test_a_promising_choice_without_a_quick_plan_is_planned() -> None:
    cluster = db.Cluster.from_dict({"devices": "4xL4-24GB", "memory_limit": "7GiB"})
    tight = Job(
        model=db.models["llama3.2-1b"], cluster=cluster, global_batch=8, options=RunOptions(sequence_length=2048),
        fixed={"tensor": 1, "context": 1, "micro_batch_size": 1}, effort=0.1,
    )  # fmt: skip
    best = search_degrees(tight)
    assert str(best.degrees) == "pipeline 2, data 2, ZeRO-2, 4 micro-batches of 1"
    with pytest.raises(DebubbleError):
        quick_step(tight.problem(best.degrees))
    assert best.search.too_large + best.search.planned + best.search.slower <= best.search.legal


@pytest.mark.parametrize(("deadline", "cut_off"), [(1e-3, True), (None, False)])
def test_a_search_says_whether_the_deadline_ended_it(deadline: float | None, cut_off: bool) -> None:
    assert search_degrees(replace(job(), deadline=deadline)).search.cut_off == cut_off


@pytest.mark.slow
def test_short_memory_tries_other_micro_batch_sizes() -> None:
    best = search_degrees(job("llama3-8b", "4xL40S-48GB", batch=32, sequence_length=4096))
    sizes = {row.degrees.micro_batch_size for row in best.search.configurations if row.degrees.pipeline == 4}
    assert best.degrees.micro_batch_size == 1
    assert {1, 2} <= sizes
    with pytest.raises(DebubbleError):
        quick_step(best.problem)


def test_a_deadline_without_an_answer_is_no_misfit() -> None:
    cluster = db.Cluster.from_dict({"devices": "4xL4-24GB", "memory_limit": "4GiB"})
    tight = replace(job("llama3.2-1b", sequence_length=2048), cluster=cluster, deadline=1e-3)
    with pytest.raises(CutOffError, match=r"quick plans fit none of the .* choices of degrees"):
        search_degrees(tight)


@pytest.mark.slow
def test_with_hosted_optimizers_no_fixed_choice_is_faster() -> None:
    cluster = db.Cluster.from_dict({"devices": "4xL4-24GB", "memory_limit": "4GiB"})
    tight = Job(
        model=db.models["llama3.2-1b"], cluster=cluster, global_batch=8, options=RunOptions(sequence_length=2048),
        fixed={"data": 1, "context": 1}, effort=0.2,
    )  # fmt: skip
    best = search_degrees(tight, planner="chronos")
    assert best.result.solution.schedule.host_steps
    for degrees in configurations(tight):
        try:
            fixed = planners["chronos"](tight.problem(degrees))
        except DebubbleError:
            continue
        assert float(best.result.time) <= 1.02 * float(fixed.time)


@pytest.mark.slow
def test_choices_without_an_answer_have_their_quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(problem: Problem) -> Solution:
        raise db.InfeasibleError("It did not answer in time.")

    monkeypatch.setattr("debubble.planners.degrees.search.thorough", no_answer)
    asked = replace(job(), fixed={"tensor": 1})
    assert search_degrees(asked).search.configurations == quickest(asked).search.configurations


def test_a_quick_plan_that_gathers_parameters_fits() -> None:
    cluster = db.Cluster.from_dict({"devices": "8xH100-80GB", "memory_limit": "90GiB"})
    asked = replace(job("llama3.1-8b", batch=16, sequence_length=8192), cluster=cluster)
    problem = asked.problem(Degrees(data=8, zero=3, micro_batch_size=2))
    step, plan = quick_step(problem)
    assert float(verify("quick", problem, plan, 0.0).time) == pytest.approx(step)


def test_quantized_weights_are_divided_only_as_a_last_resort() -> None:
    """No runtime divides them."""
    adapters = RunOptions(sequence_length=512, lora=8, quantize="nf4")
    asked = replace(job("llama3-8b", "8xRTX4090-24GB"), options=adapters, effort=0.02)
    narrow = replace(asked, cluster=asked.cluster.with_limit("5GiB"), fixed={"pipeline": 1, "tensor": 1, "context": 1})

    assert search_degrees(asked).degrees.zero < 3
    assert search_degrees(narrow).degrees.zero == 3
