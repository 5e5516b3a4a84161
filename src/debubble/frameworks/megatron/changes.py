"""Changes of Megatron-LM's arguments: what cannot stand next to them, what they ask for, and which ones may help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from debubble.frameworks.megatron.export import FSDP, FSDP_FORMAT
from debubble.frameworks.megatron.mindspeed import SWAPS
from debubble.frameworks.megatron.stages import LAYOUT, SPLITS
from debubble.imports.registry import Settings
from debubble.ir import RunOptions


def conflicts(job: Settings, changed: Settings) -> Iterator[str]:
    """The job's arguments that Megatron-LM refuses next to the changed ones, or that overrule them."""
    if changed.get(LAYOUT) is not None:
        yield from (name for name in SPLITS if job.get(name))
    if "--recompute-granularity" in changed and job.get("--recompute-activations"):
        yield "--recompute-activations"
    if changed.get("--use-megatron-fsdp", True) is None or _leaves_torch_fsdp(job, changed):
        yield from (name for name in ("--use-torch-fsdp2", "--use-custom-fsdp") if job.get(name))


def required(job: Settings, changed: Settings) -> Mapping[str, Any]:
    """The arguments that Megatron-LM's checks ask for (FSDP, and its checkpoints' format), or the prediction."""
    after = {name: value for name, value in {**job, **changed}.items() if value not in (None, False)}
    said, needed = job.get("--ckpt-format"), dict[str, Any]()
    if _leaves_torch_fsdp(job, changed):
        needed = {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": FSDP[3]}
    if needed or ("--use-megatron-fsdp" in after and "--use-torch-fsdp2" not in after):
        if said != FSDP_FORMAT:
            needed["--ckpt-format"] = FSDP_FORMAT
    elif said == "torch_dcp":
        divided = _divides(after, "--tensor-model-parallel-size", "--pipeline-model-parallel-size")
        if divided or changed.get("--use-megatron-fsdp", True) is None:
            needed["--ckpt-format"] = None
    if _gathers_alone(after):
        needed = {**needed, "--overlap-param-gather": True}
    return needed


def _gathers_alone(settings: Settings) -> bool:
    """Tell whether gradients are summed next to backwards, but parameters are not gathered next to forwards."""
    on = all(name in settings for name in ("--overlap-grad-reduce", "--use-distributed-optimizer"))
    is_bridge = settings.get("framework") == "megatron-bridge"  # its recipes decide
    return on and not is_bridge and "--overlap-param-gather" not in settings


def _leaves_torch_fsdp(job: Settings, changed: Settings) -> bool:
    """Tell whether a job of torch's FSDP becomes one with a pipeline, which Megatron-LM has with its own FSDP alone."""
    stays = changed.get("--use-megatron-fsdp", True) is not None
    return bool(job.get("--use-torch-fsdp2")) and stays and _divides(changed, "--pipeline-model-parallel-size")


def _divides(arguments: Settings, *degrees: str) -> bool:
    """Tell whether one of these degrees is above 1."""
    return any(str(arguments.get(name)).strip() not in ("None", "1") for name in degrees)


def notes(job: Settings, changed: Settings) -> Iterator[str]:
    """A sentence on checkpoints, where their format or the FSDP that writes them changes."""
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
"""Formats of checkpoints, and the FSDP that wrote them, do not read each other's (Megatron-LM, checkpointing.py)."""


def switches(job: Settings, options: RunOptions) -> Iterator[Settings]:
    """Yield arguments for sequence parallelism, overlaps, divided states and recomputation, alone and together.

    The optimizer goes back to the devices alone.
    """
    if job.get("framework") == "megatron-bridge" or job.get("--deepspeed"):
        return
    if options.host_optimizer:
        yield {name: None for name in ("--optimizer-cpu-offload", SWAPS) if job.get(name)}
    sequence: Settings = {}
    if options.tensor > 1 and options.sequence_length % (options.tensor * options.context) == 0:
        sequence = {} if options.sequence_parallel else {"--sequence-parallel": True}
        if sequence:
            yield sequence
        if job.get("--transformer-impl") != "local":
            yield {**sequence, "--tp-comm-overlap": True}
    ranks = options.data * options.context
    if ranks > 1 and options.zero < 2:
        yield {"--overlap-grad-reduce": True, **({"--overlap-param-gather": True} if options.zero else {})}
    divided = {"--use-distributed-optimizer": True} if ranks > 1 and options.zero == 0 else {}
    full = {} if any(name.startswith("--recompute") and job[name] for name in job) else FULL_RECOMPUTATION
    saving = [each for each in (divided, sequence, full) if each]
    for count in range(1, len(saving) + 1):
        for several in combinations(saving, count):
            if several != (sequence,):
                yield {name: value for each in several for name, value in each.items()}


FULL_RECOMPUTATION: Settings = {
    "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1
}  # fmt: skip
"""Every layer keeps its input alone."""
