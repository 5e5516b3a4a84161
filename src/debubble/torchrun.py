"""Environment variables of ranks that torchrun has started; without torch, whose import takes seconds."""

from __future__ import annotations

import os
import sys
import time

from debubble.errors import InputError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables that a rank has from its launcher."""
TORCHRUN_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Environment variables that torchrun gives every rank."""
REFUSAL_SECONDS = 5.0
"""Seconds that rank 0 has to refuse a run; torchrun ends all ranks once one of them ends."""


def is_torchrun_rank() -> bool:
    """Tell whether this process is already a rank, started by torchrun.

    Raises InputError if the environment has some of a rank's variables, as another program leaves them.
    """
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    found = [name for name in RANK_VARIABLES if name in os.environ]
    if found and missing:
        raise InputError(
            f"The environment has {', '.join(found)}, as a rank has, but not torchrun's {', '.join(missing)}: unset"
            " them to start the ranks here, or start with torchrun."
        )
    return not missing


def check_started(ranks: int) -> None:
    """Raise InputError on rank 0 if torchrun has started another number of ranks; the others end without a word."""
    started = int(os.environ["WORLD_SIZE"]) if is_torchrun_rank() else ranks
    if started == ranks:
        return
    if os.environ["RANK"] != "0":
        time.sleep(REFUSAL_SECONDS)
        sys.exit(InputError.exit_code)
    raise InputError(f"The plan is for {ranks} ranks, but torchrun started {started}: start {ranks}.")
