"""A rank that does what its argument says; the launcher's tests start it."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from debubble.runtime.launcher import run_rank


def main(argument: str) -> None:
    behaviour, folder = argument.split(" ", 1)
    place = Path(folder)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (place / f"pid-{os.getpid()}").touch()
    dist.barrier()
    if behaviour != "end" and rank == 0:
        dist.recv(torch.zeros(1), src=1)
    if behaviour == "raise":
        raise ValueError("one plus one is three")
    if behaviour == "wait":
        print("waiting")
        signal.pause()
    (place / f"rank-{rank}-{os.environ['OMP_NUM_THREADS']}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(main)
