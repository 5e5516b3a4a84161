import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.frameworks.torch.export import read

torch = pytest.importorskip("torch")

COSTS = {
    1: db.StageCosts.of(stages=4, activation_after_input=1),
    2: db.StageCosts.of(stages=8, activation_after_input=1),
}


@pytest.fixture
def torch_order(tmp_path: Path) -> Iterator[Any]:
    """A function that returns the order of a schedule of torch for 4 devices, built on a fake process group."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(name: Any, chunks: Any, micro_batches: Any) -> Any:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        stages = [PipelineStage(torch.nn.Linear(1, 1), s, 4 * len(chunks), torch.device("cpu")) for s in chunks]
        of_one_stage = issubclass(getattr(schedules, name), schedules.PipelineScheduleSingle)
        schedule = getattr(schedules, name)(
            stages[0] if of_one_stage else stages, micro_batches, loss_fn=torch.nn.MSELoss()
        )
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(schedule.pipeline_order[rank] for rank in range(4))
        return read(path)

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("m", [1, 9])
def test_gpipe_has_the_order_of_torch(torch_order: Any, m: int) -> None:
    assert torch_order("ScheduleGPipe", [0], m).orders == db.schedules["gpipe"](devices=4, micro_batches=m).orders


@pytest.mark.parametrize("m", [4, 12])
def test_interleaved_has_the_order_of_torch(torch_order: Any, m: int) -> None:
    theirs = torch_order("ScheduleInterleaved1F1B", [0, 4], m)
    assert theirs.orders == db.schedules["interleaved"](devices=4, micro_batches=m, chunks=2).orders


@pytest.mark.parametrize("m", [4, 12])
def test_breadth_first_takes_no_longer_than_that_of_torch(torch_order: Any, m: int) -> None:
    theirs = torch_order("ScheduleLoopedBFS", [0, 4], m)
    ours = db.schedules["breadth-first"](devices=4, micro_batches=m, chunks=2)
    assert db.simulate(ours, COSTS[2]).makespan <= db.simulate(theirs, COSTS[2]).makespan


@pytest.mark.parametrize("m", [8, 9])
def test_dualpipe_v_has_the_order_of_torch(torch_order: Any, m: int) -> None:
    theirs = torch_order("ScheduleDualPipeV", [0, 7], m)
    assert theirs.orders == db.schedules["dualpipe-v"](devices=4, micro_batches=m).orders


@pytest.mark.parametrize("m", [8])
def test_zb_v_takes_no_more_time_or_memory_than_that_of_torch(torch_order: Any, m: int) -> None:
    theirs = db.simulate(torch_order("ScheduleZBVZeroBubble", [0, 7], m), COSTS[2])
    ours = db.simulate(db.schedules["zb-v"](devices=4, micro_batches=m, costs=COSTS[2], objective="span"), COSTS[2])
    assert ours.span <= theirs.span
    assert max(ours.peak_memory) <= max(theirs.peak_memory)


@pytest.mark.parametrize("m", [16])
def test_group_interleaved_is_interleaved_zb_of_torch(torch_order: Any, m: int) -> None:
    theirs = torch_order("ScheduleInterleavedZeroBubble", [0, 4], m)
    assert theirs.orders == db.schedules["group-interleaved"](devices=4, micro_batches=m, chunks=2).orders
