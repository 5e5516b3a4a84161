from concurrent.futures import Future

from debubble.ir import InfeasibleError, StageCosts
from debubble.planners import FixedStages, Problem
from debubble.planners.process_pool import Answer, searching


def left_early(problem: Problem) -> Future[Answer]:
    """A search that its caller does not wait for."""
    with searching(["optpipe"], problem) as futures:
        return futures["optpipe"]


def test_searches_that_nobody_waits_for_any_more_are_ended() -> None:
    future = left_early(
        Problem(devices=8, micro_batches=64, workload=FixedStages(StageCosts.of(stages=8, memory_limit=3)), effort=120)
    )
    assert future.cancelled() or isinstance(future.exception(), InfeasibleError)
