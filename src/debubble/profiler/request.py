"""A measurement as a user asks for it: checked, run in processes of its own, and read back."""

from __future__ import annotations

import torch

from debubble.costs import load_profile
from debubble.costs.units import Units
from debubble.ir import InputError
from debubble.models import Model
from debubble.profiler.profile import ProfileOptions
from debubble.profiler.units import DTYPES
from debubble.runtime.launcher import launch, packed
from debubble.runtime.models.build import model_units


def measure(options: ProfileOptions, *, processes: int | None = None) -> Units:
    """Measure in `processes` processes at the same time, and write the units file.

    By default there is one for each GPU that torch sees, or two on the CPU.

    Raises InputError if the call is wrong, RankFailedError if a process fails.
    """
    model, run = Model.from_hf(options.config), options.run
    model_units(options.config)  # refuses what the runtime cannot build
    if run.dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, not '{run.dtype}'.")
    if options.device not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda, not '{options.device}'.")
    if processes is None:
        processes = max(1, torch.cuda.device_count()) if options.device == "cuda" else 2
    counts = {
        "processes": processes, "repetitions": options.repetitions, "micro-batch-size": run.micro_batch_size,
        "sequence-length": run.sequence_length,
    }  # fmt: skip
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"--{name} must be at least 1, not {value}.")
    if model.positions and run.sequence_length > model.positions:
        raise InputError(
            f"The model has positions for {model.positions} tokens, fewer than --sequence-length {run.sequence_length}."
        )
    if options.device == "cuda" and torch.cuda.device_count() < processes:
        raise InputError(
            f"--device cuda needs a GPU for each of the {processes} processes, but torch sees"
            f" {torch.cuda.device_count()}: give fewer --processes, or --device cpu."
        )
    if options.offload_to is not None and not options.offload_to.is_dir():
        raise InputError(f"--offload-to: there is no folder {options.offload_to}.")
    launch("debubble.profiler.rank", packed(options), ranks=processes)
    return load_profile(options.output)
