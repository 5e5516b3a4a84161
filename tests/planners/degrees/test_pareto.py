from itertools import pairwise

import debubble as db
from debubble.ir import RunOptions
from debubble.ir.degrees import ConfigurationSummary
from debubble.planners.degrees.pareto import pareto_front
from debubble.planners.degrees.search import quickest
from debubble.planners.degrees.space import Job


def job(**fixed: int) -> Job:
    return Job(
        model=db.models["llama3.2-1b"], cluster=db.Cluster.parse("4xL40S"), global_batch=8, fixed=fixed, effort=20.0,
        options=RunOptions(sequence_length=2048),
    )  # fmt: skip


def fastest(asked: Job) -> ConfigurationSummary:
    return quickest(asked).search.configurations[0]


def test_the_front_starts_at_the_plan_and_gets_smaller() -> None:
    best = fastest(job())
    front = pareto_front(job(), best)
    assert front[0] == best
    assert len(front) > 2
    for faster, smaller in pairwise(front):
        assert faster.step_time < smaller.step_time
        assert smaller.peak_memory <= 0.8 * faster.peak_memory


def test_the_front_keeps_fixed_degrees() -> None:
    asked = job(pipeline=4, tensor=1, data=1, context=1)
    front = pareto_front(asked, fastest(asked))
    assert {point.degrees.pipeline for point in front} == {4}
    assert len(front) < 6
