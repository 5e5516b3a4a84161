"""Changes of Megatron-LM's arguments: conflicts with them, further arguments they require, and useful switches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from debubble.frameworks.megatron.export import FSDP, FSDP_FORMAT
from debubble.frameworks.megatron.mindspeed import SWAP_OPTIMIZER
from debubble.frameworks.megatron.stages import LAYOUT, SPLITS
from debubble.imports.registry import Settings
from debubble.ir import RunOptions


def conflicts(job: Settings, changed: Settings) -> Iterator[str]:
    """The job's arguments that Megatron-LM rejects together with the changed ones, or that override them."""
    if changed.get(LAYOUT) is not None:
        yield from (name for name in SPLITS if job.get(name))
    if "--recompute-granularity" in changed and job.get("--recompute-activations"):
        yield "--recompute-activations"
    if changed.get("--use-megatron-fsdp", True) is None or _leaves_torch_fsdp(job, changed):
        yield from (name for name in ("--use-torch-fsdp2", "--use-custom-fsdp") if job.get(name))


def required(job: Settings, changed: Settings) -> Mapping[str, Any]:
    """The arguments required by Megatron-LM's checks (FSDP and its checkpoint format)."""
    after = {name: value for name, value in {**job, **changed}.items() if value not in (None, False)}
    checkpoint_format, needed = job.get("--ckpt-format"), dict[str, Any]()
    if _leaves_torch_fsdp(job, changed):
        needed = {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": FSDP[3]}
    if needed or ("--use-megatron-fsdp" in after and "--use-torch-fsdp2" not in after):
        if checkpoint_format != FSDP_FORMAT:
            needed["--ckpt-format"] = FSDP_FORMAT
    elif checkpoint_format == "torch_dcp":
        divided = _divides(after, "--tensor-model-parallel-size", "--pipeline-model-parallel-size")
        if divided or changed.get("--use-megatron-fsdp", True) is None:
            needed["--ckpt-format"] = None
    return needed


def _leaves_torch_fsdp(job: Settings, changed: Settings) -> bool:
    """Tell whether a job with torch's FSDP gets a pipeline, which requires Megatron-FSDP."""
    stays = changed.get("--use-megatron-fsdp", True) is not None
    return bool(job.get("--use-torch-fsdp2")) and stays and _divides(changed, "--pipeline-model-parallel-size")


def _divides(arguments: Settings, *degrees: str) -> bool:
    """Tell whether any of these degrees is above 1."""
    return any(str(arguments.get(name)).strip() not in ("None", "1") for name in degrees)


def notes(job: Settings, changed: Settings) -> Iterator[str]:
    """A sentence on checkpoints, if their format or the FSDP that writes them changes."""
    if _checkpoints(job) != _checkpoints({**job, **changed}):
        yield OTHER_CHECKPOINTS


def _checkpoints(settings: Settings) -> tuple[Any, ...]:
    """The format of checkpoints, and the FSDP that writes them."""
    fsdps = ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2")
    return settings.get("--ckpt-format") or "torch_dist", *(bool(settings.get(name)) for name in fsdps)


OTHER_CHECKPOINTS = (
    "Earlier checkpoints are of another format or FSDP, and --load does not read them: start anew, or convert them"
    " (tools/checkpoint/checkpoint_inspector.py has convert-torch-dist-to-fsdp-dtensor)."
)
"""Checkpoint formats, and checkpoints of different FSDPs, are incompatible (Megatron-LM, checkpointing.py)."""


def switches(job: Settings, options: RunOptions) -> Iterator[Settings]:
    """Yield arguments for sequence parallelism, overlaps, sharded states and recomputation, alone and combined.

    An offloaded optimizer is moved back to the devices, without other changes.
    """
    if job.get("framework") == "megatron-bridge" or job.get("--deepspeed"):
        return
    if options.host_optimizer:
        yield {name: None for name in ("--optimizer-cpu-offload", SWAP_OPTIMIZER) if job.get(name)}
    sequence: Settings = {}
    if options.tensor > 1 and options.sequence_length % (options.tensor * options.context) == 0:
        sequence = {} if options.sequence_parallel else {"--sequence-parallel": True}
        if sequence:
            yield sequence
        if job.get("--transformer-impl") != "local":
            yield {**sequence, "--tp-comm-overlap": True}
    ranks = options.data * options.context
    if ranks > 1 and options.zero < 2:
        overlaps = ("--overlap-grad-reduce", *(("--overlap-param-gather",) if options.zero else ()))
        if off := {name: True for name in overlaps if not job.get(name)}:
            yield off
    divided = {"--use-distributed-optimizer": True} if ranks > 1 and options.zero == 0 else {}
    full = {} if any(name.startswith("--recompute") and job[name] for name in job) else FULL_RECOMPUTATION
    memory_savers = [change for change in (divided, sequence, full) if change]
    for count in range(1, len(memory_savers) + 1):
        for subset in combinations(memory_savers, count):
            if subset != (sequence,):
                yield {name: value for change in subset for name, value in change.items()}


FULL_RECOMPUTATION: Settings = {
    "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1
}  # fmt: skip
"""Full recomputation, which keeps only the input of every layer."""
