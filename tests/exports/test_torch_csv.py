from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import debubble as db
from debubble.frameworks.torch.export import read, to_csv
from debubble.ir import InputError, Schedule, ScheduleError, StageCosts
from tests.strategies import random_schedules


def compute(schedule: Schedule) -> Schedule:
    """Only F, B, I and W."""
    orders = [[op for op in order if op.kind.value in "FBIW"] for order in schedule.orders]
    return Schedule.of("schedule", schedule.placement, schedule.micro_batches, orders)


@settings(max_examples=40, deadline=None)
@given(random_schedules(offload=False))
def test_a_written_schedule_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, schedule: Schedule) -> None:
    expected = compute(schedule)
    path = tmp_path_factory.getbasetemp() / "schedule.csv"
    path.write_text(to_csv(expected))

    assert read(path) == expected


def test_bubbles_overlaps_and_messages_leave_only_the_order(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(
        "0F0,0SEND_F0,,0F1,0RECV_B0,(0B0;0F2)OVERLAP_F_B,0B1,0REDUCE_GRAD,0B2\n,1UNSHARD,1F0,1B0,1F1,1I1,1W1,1F2,1B2\n"
    )

    schedule = read(path)

    assert schedule.name == "order"
    assert schedule.micro_batches == 3
    assert [" ".join(op.name for op in order) for order in schedule.orders] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1I1 1W1 1F2 1B2",
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no operation"),
        ("0F0,0BW0\n", "row 1, cell 2: '0BW0' is no operation of a torch schedule"),
        ("0F0,2F0junk\n", "row 1, cell 2: '2F0junk'"),
        ("0F0,0B0\n2F0,2B0\n", "has no operation of stage 1"),
    ],
)
def test_a_bad_file_is_refused_with_a_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)

    with pytest.raises(InputError) as caught:
        read(path)

    assert sentence in str(caught.value)


def test_an_order_that_is_no_training_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0F1,0B0\n")

    with pytest.raises(ScheduleError, match="The backward of stage 0, micro-batch 1 is missing"):
        read(path)


torch = pytest.importorskip("torch")


@pytest.fixture
def stages_on_rank_0(tmp_path: Path) -> Iterator[Any]:
    """Construct torch's stages of one rank without the other ranks of the pipeline."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(devices: int, chunks: list[int], stages: int) -> list[PipelineStage]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
        return [PipelineStage(torch.nn.Linear(1, 1), s, stages, torch.device("cpu")) for s in chunks]

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_torch_loads_our_order_and_adds_the_messages(tmp_path: Path, stages_on_rank_0: Any, name: str) -> None:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = db.schedules[name](devices=4, micro_batches=8)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule))
    stages = list(schedule.placement.stages_of[0])
    runtime = _PipelineScheduleRuntime(stages_on_rank_0(4, stages, schedule.stages), 8, loss_fn=torch.nn.MSELoss())

    runtime._load_csv(str(path))

    loaded = [[str(action) for action in runtime.pipeline_order[rank]] for rank in range(4)]
    assert loaded == [[op.name for op in order] for order in schedule.orders]
    sends = [str(a) for rank in runtime.pipeline_order_with_comms.values() for a in rank if "SEND" in str(a)]
    program = db.lower(schedule, StageCosts.of(stages=schedule.stages))
    assert sorted(sends) == sorted(i.op.name for i in program.instructions if "SEND" in i.op.name)


@pytest.mark.parametrize(
    ("name", "chunks", "placement"),
    [
        ("ScheduleInterleaved1F1B", [0, 4], db.Placement.looped(4, 2)),
        ("ScheduleInterleavedZeroBubble", [0, 4], db.Placement.looped(4, 2)),
        ("ScheduleLoopedBFS", [0, 4], db.Placement.looped(4, 2)),
        ("ScheduleZBVZeroBubble", [0, 7], db.Placement.v_shape(4)),
        ("ScheduleDualPipeV", [0, 7], db.Placement.v_shape(4)),
    ],
)
def test_torch_orders_are_read_and_simulated(
    tmp_path: Path, stages_on_rank_0: Any, name: str, chunks: list[int], placement: db.Placement
) -> None:
    from torch.distributed.pipelining import schedules

    made = getattr(schedules, name)(stages_on_rank_0(4, chunks, 8), 8, loss_fn=torch.nn.MSELoss())
    path = tmp_path / f"{name}.csv"
    made._dump_csv(str(path))

    schedule = read(path)
    timeline = db.simulate(schedule, StageCosts.of(stages=8))

    assert schedule.placement == placement
    assert schedule.micro_batches == 8
    # Each device computes 2 chunks x 8 micro-batches x (F, I and W of 1 each), and no schedule idles as long as GPipe.
    assert timeline.busy == (48, 48, 48, 48)
    assert 48 < timeline.makespan <= 48 + 7 * 3


def test_gpipe_of_torch_has_our_order(tmp_path: Path, stages_on_rank_0: Any) -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    made = ScheduleGPipe(stages_on_rank_0(4, [0], 4)[0], 6, loss_fn=torch.nn.MSELoss())
    order = made._get_pipeline_order()
    assert order is not None
    path = tmp_path / "gpipe.csv"
    path.write_text("".join(",".join(str(a) if a else "" for a in order[rank]) + "\n" for rank in range(4)))

    assert read(path) == db.schedules["gpipe"](devices=4, micro_batches=6)
