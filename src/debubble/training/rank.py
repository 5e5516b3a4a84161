"""One rank of `debubble train`."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from rich.console import Console

from debubble.runtime.launch.launcher import decode_options, open_process_group, run_rank
from debubble.training.options import TrainOptions
from debubble.training.trainer import train


def main(argument: str) -> None:
    """Train with the options, given as JSON; rank 0 prints the summary on standard output."""
    options = decode_options(argument, TrainOptions)
    open_process_group("nccl" if _has_own_gpu() else "gloo")
    outcome = train(options)
    if outcome is not None:
        if options.json:
            print(json.dumps(outcome.as_dict(), indent=1), flush=True)
        else:
            Console(highlight=False).print(outcome.render())
    dist.destroy_process_group()


def _has_own_gpu() -> bool:
    """Select this rank's GPU, and tell whether every rank of this host has one."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return False
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return True


if __name__ == "__main__":
    run_rank(main)
