"""Ranks of which the first waits for a message, and the second raises, waits or signals itself."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from debubble.runtime.launch.launcher import open_process_group, run_rank


def main(argument: str) -> None:
    behaviour, folder = argument.split(" ", 1)
    place = Path(folder)
    open_process_group("gloo")
    rank = dist.get_rank()
    (place / f"pid-{os.getpid()}").touch()
    dist.barrier()
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    if behaviour == "raise":
        raise ValueError("one plus one is three")
    if behaviour.isdecimal():
        os.kill(os.getpid(), int(behaviour))
    (place / "waiting").write_text("waiting")
    signal.pause()


if __name__ == "__main__":
    run_rank(main)
