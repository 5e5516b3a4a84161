"""Environment variables of ranks that torchrun starts; without torch, whose import takes seconds."""

from __future__ import annotations

import os
import sys
import time

from debubble.errors import InputError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables that every launcher sets for a rank."""
TORCHRUN_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Environment variables that torchrun sets for a rank."""
REFUSAL_SECONDS = 5.0
"""Seconds that other ranks wait for rank 0 to report an error; torchrun ends all ranks once one of them ends."""


def is_torchrun_rank() -> bool:
    """Tell whether torchrun started this process as a rank.

    Raises InputError if the environment has only some of a rank's variables, as left by another program.
    """
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    present = [name for name in RANK_VARIABLES if name in os.environ]
    if present and missing:
        raise InputError(
            f"The environment has {', '.join(present)}, as a rank has, but not torchrun's {', '.join(missing)}: unset"
            " them to start the ranks here, or start with torchrun."
        )
    return not missing


def check_started(ranks: int) -> None:
    """Raise InputError on rank 0 if torchrun started another number of ranks; other ranks exit silently."""
    started = int(os.environ["WORLD_SIZE"]) if is_torchrun_rank() else ranks
    if started == ranks:
        return
    if os.environ["RANK"] != "0":
        time.sleep(REFUSAL_SECONDS)
        sys.exit(InputError.exit_code)
    raise InputError(f"The plan is for {ranks} ranks, but torchrun started {started}: start {ranks}.")
