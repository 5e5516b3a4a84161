"""One process of a measurement."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from debubble.profiler.profile import ProfileOptions, profile
from debubble.runtime.launcher import decode_options, run_rank


def main(argument: str) -> None:
    """Measure what the options (as JSON) say."""
    options = decode_options(argument, ProfileOptions)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    profile(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(main)
