"""What a GPU does with the plans that are made for it: one command, on one CUDA device.

    python benchmarks/gpu.py [--output benchmarks/results/gpu.json]
    python benchmarks/gpu.py --device cpu --tiny        # the same on a CPU, in seconds: to try the benchmark itself

It profiles the blocks of Llama-2 7B and 13B with the runtime's own stages, measures the host link, alone and beside
compute, and runs three Programs of several stages on the one device (all kept, all recomputed, and offloaded under a
memory limit) against their simulation with the measured costs.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import torch

import debubble as db
from debubble.costs import Model, named_model
from debubble.costs.units import Units
from debubble.ir import Kind, Lane, Op, Placement, PlannedUnit, RunOptions, Schedule, Trace
from debubble.profiler.clock import median_time
from debubble.profiler.links import host_bandwidth
from debubble.profiler.profile import layered
from debubble.profiler.units import Slice, costs_of
from debubble.runtime.lanes import lanes_of
from debubble.runtime.models.building import model_units as units_of
from debubble.runtime.parallel.transport import Alone
from debubble.runtime.pipeline import Pipeline
from debubble.training.flops import flops_per_token
from debubble.views.comparison import compare

MODELS = ("llama2-7b", "llama2-13b")
STAGES, MICRO_BATCHES, LAYERS = 4, 4, 4
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of Llama-2")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if given.tiny:
        models, run = {"tiny": TINY}, RunOptions(sequence_length=32, dtype="fp32")
    else:
        models = {name: dict(named_model(name).config) for name in MODELS}
        run = RunOptions(sequence_length=given.sequence_length, dtype="bf16")
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "sequence_length": run.sequence_length, "dtype": run.dtype,
        "models": {
            name: of_model(config, run, device, repetitions=given.repetitions) for name, config in models.items()
        },
    }  # fmt: skip
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, figures in result["models"].items():
        tell(name, figures)


def tell(name: str, figures: dict) -> None:
    link = figures["host_link"]
    print(f"{name}: host link {link['bytes_per_second'] / 1e9:.1f} GB/s, {100 * link['hidden']:.0f}% hidden by compute")
    for program, measured in figures["programs"].items():
        step, peak = measured["step_seconds"], measured["peak_activation_bytes"]["ratio"]
        times = f"step {1e3 * step['measured']:8.1f} ms, predicted {1e3 * step['predicted']:8.1f} ms"
        print(f"  {program:10} {times}, ratio {step['ratio']:.3f}; peak of activations, ratio {peak:.3f}")


def of_model(config: dict, run: RunOptions, device: torch.device, *, repetitions: int) -> dict:
    config = {**config, "num_hidden_layers": LAYERS}
    part = Slice(config, run, device)
    measured = part.measure(repetitions=repetitions)
    kinds = costs_of(part.planned, measured, static=[0.0] * len(part.units), config=config)
    link = host_link(part, repetitions=repetitions)
    units = Units(units=layered(kinds, config), offload_bandwidth=link["bytes_per_second"])
    del part
    return {
        "blocks": blocks(units, config, run),
        "host_link": link,
        "programs": {
            name: of_program(plan, device, repetitions=repetitions) for name, plan in plans(units, config, run)
        },
    }  # fmt: skip


def blocks(units: Units, config: dict, run: RunOptions) -> dict:
    """What one layer costs: seconds, bytes, and the operations per second that its forward comes to."""
    layer = [unit for unit in units.units if unit.layer == 0]
    forward = sum(float(unit.forward) for unit in layer)
    two, one = (
        flops_per_token(Model.from_hf({**config, "num_hidden_layers": count}), run.sequence_length) for count in (2, 1)
    )
    operations = (two - one) / 3  # a forward's part
    return {
        "forward_seconds": forward,
        "backward_seconds": sum(float(unit.backward_input + unit.backward_weight) for unit in layer),
        "weight_seconds": sum(float(unit.backward_weight) for unit in layer),
        "recompute_seconds": sum(float(unit.strategies["full"].recompute) for unit in layer),
        "activation_bytes": sum(float(unit.strategies["none"].activation) for unit in layer),
        "forward_flops_per_second": operations * run.sequence_length * run.micro_batch_size / forward,
    }


def host_link(part: Slice, *, repetitions: int) -> dict:
    """Bandwidth to pinned memory, and how much of a copy's time disappears beside compute on another stream."""
    lanes, device = lanes_of(part.device), part.device
    large, small = (2**28, 2**26) if device.type == "cuda" else (2**20, 2**20)
    bandwidth = host_bandwidth(device, host=lanes.host, size=large, repetitions=repetitions)
    x = part.boundary.flatten(0, -2)
    weight = torch.randn(x.shape[-1], 4 * x.shape[-1], device=device, dtype=x.dtype)
    content = torch.empty(small, dtype=torch.uint8, device=device)
    buffer = lanes.host.take(len(content))

    def copy() -> None:
        with lanes.lane(Lane.D2H, None):
            buffer.copy_(content, non_blocking=True)

    copying = median_time(copy, repetitions=repetitions, device=device)
    times = max(1, round(copying / median_time(lambda: x @ weight, repetitions=repetitions, device=device)))

    def compute() -> None:
        for _ in range(times):
            x @ weight

    computing = median_time(compute, repetitions=repetitions, device=device)
    both = median_time(lambda: beside(copy, compute), repetitions=repetitions, device=device)
    return {
        "bytes_per_second": bandwidth, "copy_seconds": copying, "compute_seconds": computing, "both_seconds": both,
        "hidden": (copying + computing - both) / min(copying, computing),
    }  # fmt: skip


def beside(first: Callable[[], None], second: Callable[[], None]) -> None:
    helper = Thread(target=first)
    helper.start()
    second()
    helper.join()


def plans(units: Units, config: dict, run: RunOptions) -> Iterator[tuple[str, db.Plan]]:
    """Several stages on one device: everything kept, everything recomputed, and offloaded under a limit."""
    stages, placement = range(STAGES), Placement.of([0] * STAGES)
    forwards = [Op(Kind.F, s, j) for j in range(MICRO_BATCHES) for s in stages]
    backwards = [Op(Kind.B, s, j) for j in reversed(range(MICRO_BATCHES)) for s in reversed(stages)]
    kept = Schedule.of("kept", placement, MICRO_BATCHES, [[*forwards, *backwards]])
    recomputed = replace(kept, name="recomputed", fused_recompute=frozenset(stages))
    yield "kept", plan_of(kept, units, config, run, strategy="none", limit=None)
    yield "recomputed", plan_of(recomputed, units, config, run, strategy="full", limit=None)
    order = []
    for op in forwards:
        order += [op] if op.micro_batch == MICRO_BATCHES - 1 else [op, Op(Kind.O, op.stage, op.micro_batch)]
    for op, following in itertools.zip_longest(backwards, backwards[STAGES:]):
        # A micro-batch comes back, stage by stage, while the one before it is in its backward.
        order += [op] if following is None else [Op(Kind.L, following.stage, following.micro_batch), op]
    micro_batch = sum(float(unit.strategies["none"].activation) for unit in units.units)
    offloaded = Schedule.of("offloaded", placement, MICRO_BATCHES, [order])
    yield "offloaded", plan_of(offloaded, units, config, run, strategy="none", limit=2.5 * micro_batch)


def plan_of(
    schedule: Schedule, units: Units, config: dict, run: RunOptions, *, strategy: str, limit: float | None
) -> db.Plan:
    planned = [replace(u, strategy="none" if u.layer is None else strategy) for u in units_of(config)]
    bounds = [round(len(planned) * s / STAGES) for s in range(STAGES + 1)]
    cut = [range(a, b) for a, b in itertools.pairwise(bounds)]
    partition: list[list[tuple[int, str]]] = [[(i, planned[i].strategy) for i in stage] for stage in cut]
    costs = units.stage_costs(partition, schedule.placement)
    held: tuple[tuple[PlannedUnit, ...], ...] = tuple(tuple(planned[i] for i in stage) for stage in cut)
    return db.Plan(
        planner="benchmark", schedule=schedule, costs=costs if limit is None else costs.with_limit(limit),
        lower_bound=0, partition=held, model=config, options=run,
    )  # fmt: skip


def of_program(plan: db.Plan, device: torch.device, *, repetitions: int, warm_up: int = 2) -> dict:
    """Run a plan, and compare the typical step with its simulation."""
    pipeline = Pipeline(None, plan, transport=Alone(), device=device)
    shape = (MICRO_BATCHES, plan.options.sequence_length + 1)
    tokens = torch.randint(plan.model["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    steps, allocated = [], 0
    for step in range(warm_up + repetitions):
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        pipeline.step(tokens)
        if step >= warm_up:
            steps += pipeline.gather_trace().steps
        if device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated() - before
        for parameter in pipeline.parameters():
            parameter.grad = None
    comparison = compare(plan, Trace(devices=1, steps=tuple(replace(s, step=i) for i, s in enumerate(steps, warm_up))))
    predicted = float(plan.simulate().peak_memory[0])
    return {
        "step_seconds": {**vars(comparison.makespan), "ratio": comparison.makespan.ratio},
        "bubble_fraction": vars(comparison.bubble_fraction),
        "kinds": {kind.value: vars(pair) for kind, pair in comparison.kinds.items()},
        "peak_activation_bytes": {
            "predicted": predicted, "measured": pipeline.peak_activation, "ratio": pipeline.peak_activation / predicted,
            "limit": None if plan.costs.memory_limit is None else float(plan.costs.memory_limit[0]),
        },
        "peak_allocated_in_step_bytes": allocated,
        "offloaded_bytes": pipeline.peak_offloaded,
        "drift": comparison.drift,
    }  # fmt: skip


if __name__ == "__main__":
    main()
