"""A step of torch's own pipelining on a spawned Gloo rank."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, ROWS = 16, 4


def bytes_between_steps(rank: int, folder: Path, micro_batches: int) -> None:
    """Bytes of all tensors with the shape of messages that exist after a step, saved by rank."""
    ranks = dist.get_world_size()
    stage = PipelineStage(torch.nn.Linear(WIDTH, WIDTH), rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=torch.nn.MSELoss())
    batch = torch.ones(micro_batches * ROWS, WIDTH)
    if rank == 0:
        schedule.step(batch)
    elif rank == ranks - 1:
        schedule.step(target=batch, losses=[])
    else:
        schedule.step()
    infos = [info for table in (stage.args_recv_info, stage.grad_recv_info) for row in table.values() for info in row]
    received = [info.buffer for info in infos if info.buffer is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in (*received, *stage.output_chunks)}
    torch.save(sum(storages.values()), folder / f"rank{rank}.pt")
