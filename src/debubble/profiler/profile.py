"""A profile of a model: units and links, measured in several processes at the same time.

The processes run concurrently like a pipeline's ranks, because cores that share memory slow each other down.  Times of
messages, of copies between device and host, and of the CPU optimizer step are medians after a warm-up.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from debubble.costs import files as costs
from debubble.costs import load_profile
from debubble.costs.files import units_to_dict
from debubble.costs.frameworks import MEGATRON
from debubble.costs.step import parameter_bytes, step_traffic
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.errors import check_at_least_one
from debubble.files import write_json
from debubble.ir import InputError, RunOptions
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import check_units
from debubble.processes import own_cores
from debubble.profiler.device_memory import context_bytes
from debubble.profiler.units import (
    DTYPES,
    WARM_UP_REPETITIONS,
    Kind,
    Measurements,
    ModelSlice,
    UnitSequence,
    costs_of,
    kind_of,
    merge,
    spread_of,
)
from debubble.runtime.distributed.gradient_norm import sum_of_squares
from debubble.runtime.execution.lanes import lanes_of
from debubble.runtime.launch.launcher import decode_options, encode_options, launch, open_process_group, run_rank
from debubble.runtime.memory.host import HostMemory


def median_time(action: Callable[[], object], *, repetitions: int, device: torch.device) -> float:
    """Median seconds of an action on the device."""
    times: list[float] = []
    for _ in range(WARM_UP_REPETITIONS + repetitions):
        wait(device)
        start = time.perf_counter()
        action()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP_REPETITIONS:])


def wait(device: torch.device) -> None:
    """Wait until the device has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def message_time(tensor: torch.Tensor, *, repetitions: int) -> float:
    """Seconds of a message of this size: half a round trip between an even and an odd rank.

    All ranks, an even number, call this.
    """
    rank = dist.get_rank()
    peer = rank ^ 1

    def round_trip() -> None:
        first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
        first(tensor, peer)
        second(tensor, peer)

    return median_time(round_trip, repetitions=repetitions, device=tensor.device) / 2


def host_bandwidth(device: torch.device, *, host: HostMemory, size: int = 2**24, repetitions: int) -> float:
    """Bytes per second between device and host memory, in the slower direction."""
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = host.take(size)
    down = median_time(lambda: on_host.copy_(on_device, non_blocking=True), repetitions=repetitions, device=device)
    up = median_time(lambda: on_device.copy_(on_host, non_blocking=True), repetitions=repetitions, device=device)
    return size / max(down, up)


STEPPED_PARAMETERS = 2**22
"""Parameters of the CPU optimizer step that is measured."""


def host_step_bandwidth(options: RunOptions, *, repetitions: int) -> float:
    """Bytes per second of host memory that an AdamW step on the host reaches.

    As in a run, the step includes the norm of its gradients and the copies for a rollback.

    Args:
        options: The run; bytes per parameter are those of the cost model.
        repetitions: Number of measured steps.
    """
    weight = torch.zeros(STEPPED_PARAMETERS, requires_grad=True)
    weight.grad = gradient = torch.ones(STEPPED_PARAMETERS)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    states = [weight.detach(), *(s for s in optimizer.state[weight].values() if s.numel() == STEPPED_PARAMETERS)]
    copies = [torch.empty_like(tensor) for tensor in states]

    def step() -> None:
        sum_of_squares([gradient])
        for copy, tensor in zip(copies, states, strict=True):
            copy.copy_(tensor)
        optimizer.step()

    seconds = median_time(step, repetitions=repetitions, device=torch.device("cpu"))
    run = replace(options, dtype="fp32", optimizer="adamw", post_validation=True)
    return STEPPED_PARAMETERS * step_traffic(run, framework=MEGATRON) / seconds


_CHEAP = {"attention": ("norm",), "mlp": ("norm+multiply", "norm+activation")}
ALIASES: Mapping[str, Mapping[str, Sequence[str]]] = {"cmb": _CHEAP, "selective": _CHEAP}
"""Planners' name of a strategy -> type of unit -> the operators that it recomputes.  Fused attention cores keep no
scores, so selective recomputation does not include them (as in costs/analytical/operators.py)."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of a profile, the same in every process."""

    config: Mapping[str, Any]
    """The model's Hugging Face config."""
    run: RunOptions
    output: Path
    device: str = "cpu"
    repetitions: int = 10
    offload_to: Path | None = None
    """Folder for offloaded activations; None: the host's memory."""


def profile(options: ProfileOptions) -> None:
    """Measure in all processes of the group concurrently; rank 0 writes the units file."""
    device = _device(options.device)
    model_slice = ModelSlice(options.config, options.run, device)
    of_ranks: list[Measurements] = [{} for _ in range(dist.get_world_size())]
    dist.barrier()
    dist.all_gather_object(of_ranks, model_slice.measure(repetitions=options.repetitions))
    unplanned: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(unplanned, unplanned_bytes(model_slice))
    static = [static_bytes(unit, options.run) for unit in model_slice.units]
    measured = merge(of_ranks)
    kinds = costs_of(model_slice.planned, measured, static=static, config=options.config)
    boundary = model_slice.boundary
    paired = dist.get_world_size() % 2 == 0
    units = Units(
        units=units_of_layers(kinds, options.config),
        communication=message_time(boundary, repetitions=5 * options.repetitions) if paired else 0.0,
        offload_bandwidth=offload_bandwidth(
            model_slice, repetitions=options.repetitions, offload_to=options.offload_to
        ),
        host_step_bandwidth=host_step_bandwidth(options.run, repetitions=options.repetitions),
    )
    if dist.get_rank() == 0:
        run = options.run
        source = costs.ProfileSource(
            model=dict(options.config), dtype=run.dtype, sequence_length=run.sequence_length,
            micro_batch_size=run.micro_batch_size, lora=run.lora,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            unplanned_bytes=max((size for size in unplanned if size is not None), default=None),
            spread=spread_of(measured),
        )  # fmt: skip
        write_json(options.output, {"measured": source, **units_to_dict(units)})


def unplanned_bytes(sequence: UnitSequence) -> int | None:
    """GPU bytes of the context and of operations' workspaces; None on the CPU."""
    return context_bytes(sequence.device) + sequence.workspace.peak if sequence.device.type == "cuda" else None


def static_bytes(unit: torch.nn.Module, run: RunOptions) -> float:
    """Bytes of a unit's parameters with their gradients and optimizer states."""
    sizes = parameter_bytes(run, shards=1, framework=MEGATRON)
    return sum(p.numel() * (sizes if p.requires_grad else sizes.frozen).total for p in unit.parameters())


def offload_bandwidth(sequence: UnitSequence, *, repetitions: int, offload_to: Path | None = None) -> float:
    """Bytes per second of offload to memory or a folder: of a GPU's link, or of a CPU thread next to computing."""
    host = lanes_of(sequence.device, offload_to=offload_to).host
    if sequence.device.type == "cuda":
        return host_bandwidth(sequence.device, host=host, size=2**28, repetitions=repetitions)
    return sequence.offload_bandwidth(host=host, repetitions=repetitions)


def units_of_layers(kinds: Mapping[Kind, Unit], config: Mapping[str, Any]) -> tuple[Unit, ...]:
    """All units of the model, with the costs of their kinds."""
    return tuple(_unit(kinds[kind_of(u, config)], u.layer) for u in ModelConfig.from_hf(config).units)


def _unit(measured: Unit, layer: int | None) -> Unit:
    """The measured unit for a layer, with strategies under planners' names (`ALIASES`)."""
    named = {
        alias: replace(measured.strategies[operators], operators=operators)
        for alias, of_type in ALIASES.items()
        for operators in of_type.get(measured.type, ())
        if operators in measured.strategies
    }
    return replace(measured, layer=layer, strategies={**measured.strategies, **named})


def _device(kind: str) -> torch.device:
    """This process's device: the CPU, with its number of threads set, or the current GPU."""
    torch.set_num_threads(threads_of_rank(kind))
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def threads_of_rank(kind: str) -> int:
    """Threads of a rank: one on a CPU; next to a GPU all of its cores, for CPU optimizer steps."""
    return own_cores() if kind == "cuda" else 1


def measure(options: ProfileOptions, *, processes: int | None = None) -> Units:
    """Measure in `processes` concurrent processes, and write the units file.

    By default there is one process per GPU that torch sees, or two on the CPU.

    Raises InputError if the call is wrong, RankFailedError if a process fails.
    """
    model, run = ModelConfig.from_hf(options.config), options.run
    if not model.whole_layers:
        check_units(model)
    if run.dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, not '{run.dtype}'.")
    if options.device not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda, not '{options.device}'.")
    if processes is None:
        processes = max(1, torch.cuda.device_count()) if options.device == "cuda" else 2
    check_at_least_one(
        processes=processes, repetitions=options.repetitions, micro_batch_size=run.micro_batch_size,
        sequence_length=run.sequence_length,
    )  # fmt: skip
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
    launch("debubble.profiler.profile", encode_options(options), ranks=processes)
    return load_profile(options.output)


def main(argument: str) -> None:
    """Run `profile` in one process, with options as JSON."""
    options = decode_options(argument, ProfileOptions)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    open_process_group("nccl" if options.device == "cuda" else "gloo")
    profile(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(main)
