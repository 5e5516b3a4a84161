"""A tiny Llama with counted bytes and given times, planned by a paper's planner and run by its plan."""

from dataclasses import replace
from typing import Any

import torch

from debubble.costs.unit import HostStates, Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Kind, Lane, Op, RunOptions
from debubble.models import ModelConfig
from debubble.planners import ModelUnits, Problem
from debubble.planners.plan_model import solve
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.stage import SavePolicy, Stage
from debubble.runtime.models.units import MicroBatch
from tests.support.model_cases import on_cpus
from tests.support.runtime_cases import assert_same_gradients, run_threads, tokens_of

LENGTH = 32
LLAMA8 = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.3,
}  # fmt: skip

TIMES = {"embedding": 0.1, "attention": 1.0, "mlp": 1.5, "head": 2.5}
"""Milliseconds of a forward; the backward takes twice as long."""

STRATEGIES = {
    "embedding": {},
    "attention": {"cmb": ("norm", 0.1), "core": ("core", 0.3), "norm+core": ("norm+core", 0.4), "full": ("full", 1.0)},
    "mlp": {
        "cmb": ("norm+activation+multiply", 0.2), "activation+multiply": ("activation+multiply", 0.1),
        "mlp": ("mlp", 0.8), "full": ("full", 1.0),
    },
    "head": {},
}  # fmt: skip
"""Recomputation choices of a unit, by name in the plan, and their fraction of the forward's time."""

STEP_COUNT = 4
"""Bytes that torch's AdamW keeps per tensor besides its moments."""

TRANSFERS = 4e8
"""Bytes per second to the host: moving an MLP's activation takes about a third of its forward."""


def counted(config: Any, unit: Any, *, dtype: Any) -> Any:
    """Bytes that a unit keeps after F, keeps after I, and needs temporarily during I, as the runtime counts them."""
    ledger = Ledger()
    built = build_stage(config, [unit], dtype=dtype)
    ledger.exclude(p for u in built for p in u.parameters())
    stage = Stage(built, [unit], ledger)
    tokens = tokens_of(config, rows=1, length=LENGTH)
    first = unit.type == "embedding"
    x = tokens[:, :-1].contiguous() if first else torch.randn(1, LENGTH, config["hidden_size"], dtype=dtype)
    y = stage.forward(0, x, MicroBatch(targets=tokens[:, 1:].contiguous()), SavePolicy(recomputing=1))
    saved_bytes = ledger.bytes
    stage.recompute(0)
    ledger.start_step()
    bytes_after_forward = ledger.bytes
    stage.backward(0, torch.ones_like(y), split=True)
    return saved_bytes, ledger.bytes, ledger.peak - max(bytes_after_forward, ledger.bytes)


def parameters_of(config: Any, unit: Any) -> Any:
    """Number of parameters and of tensors."""
    sizes = [p.numel() for u in build_stage(config, [unit]) for p in u.parameters()]
    return sum(sizes), len(sizes)


def units_of(config: Any, *, dtype: Any = torch.float64, states: int = 0, hosted: Any = None) -> Any:
    """The model's units.  Bytes per parameter on a device: `states`, or `hosted` if the host steps it."""
    made = []
    for planned in ModelConfig.from_hf(config).units:
        time = TIMES[planned.type] * 1e-3
        saved_bytes, bytes_after_input, more = counted(config, planned, dtype=dtype)
        ways = {"none": Strategy(saved_bytes)}
        for name, (operators, share) in STRATEGIES[planned.type].items():
            recomputed = counted(config, replace(planned, strategy=operators), dtype=dtype)[0]
            joined = 0 if planned.type == "mlp" and name == "full" else None
            ways[name] = Strategy(recomputed, share * time, operators, after_full=joined)
        size, tensors = parameters_of(config, planned)
        made.append(
            Unit(
                type=planned.type,
                layer=planned.layer,
                forward=time,
                backward_input=time,
                backward_weight=time,
                static=states * size + (STEP_COUNT * tensors if states else 0),
                strategies=ways,
                activation_after_input=bytes_after_input,
                workspace=more,
                on_host=None if hosted is None else HostStates(
                    static=hosted * size, gradients=4 * size, parameters=4 * size, step=1e-9 * size
                ),
            )
        )  # fmt: skip
    return Units(units=tuple(made), offload_bandwidth=TRANSFERS, communication=1e-5)


def plan_for(
    planner: Any,
    config: Any,
    *,
    units: Any,
    limit: Any = None,
    devices: int = 4,
    micro_batches: int = 8,
    chunks: Any = None,
    effort: float = 2.0,
    **options: Any,
) -> Any:
    """The planner's plan of the model under a limit in bytes, which is the same for every device."""
    limited = units if limit is None else replace(units, memory_limit=(limit,))
    problem = Problem(
        devices=devices, micro_batches=micro_batches, workload=ModelUnits(limited), chunks=chunks, effort=effort
    )
    made = RunOptions(**{"sequence_length": LENGTH, "dtype": "fp64", **options})
    return replace(solve(problem, planner=planner, options=made), model_on_cluster=on_cpus(config))


def peak_of(plan: Any) -> Any:
    return max(plan.simulate().peak_memory)


def batch_for(plan: Any, *, seed: int = 0) -> Any:
    return tokens_of(plan.model, rows=plan.micro_batches, length=LENGTH, seed=seed)


def assert_reference_equal(plan: Any) -> None:
    """Compare loss and gradients of a step with plain autograd, to a relative 1e-12."""
    assert_same_gradients(plan, plan.model, batch_for(plan))


def run(plan: Any, *, steps: int = 2) -> Any:
    """By rank: the counted peak, peak of offloaded bytes, and the trace of the last of some steps."""

    def one(pipeline: Any) -> Any:
        for _ in range(steps):
            pipeline.step(batch_for(plan))
        return (
            pipeline.measured.peak_activation,
            pipeline.measured.peak_offloaded,
            pipeline.measured.gather_trace(),
        )

    return run_threads(plan, one)


def overlapping(plan: Any, lanes: Any = (Lane.D2H, Lane.H2D)) -> Any:
    """Names of the operations on these lanes during which their device computes, as predicted by the plan.

    Measured overlap depends on thread scheduling: `compare` reports it, and no test asserts it.
    """
    operations = plan.simulate().operations
    computing = [o for o in operations if o.lane is Lane.COMPUTE]
    return {
        o.name
        for o in operations
        if o.lane in lanes and any(c.device == o.device and c.start < o.end and o.start < c.end for c in computing)
    }


def moved_beside_compute(plan: Any, *, steps: int = 50) -> Any:
    """Kinds of transfers that overlapped compute on their device in the first steps that show it.

    Thread scheduling may prevent any overlap in a single step.
    """

    def one(pipeline: Any) -> Any:
        seen = set()
        for _ in range(steps):
            pipeline.step(batch_for(plan))
            events = pipeline.measured.gather_trace().steps[-1].events
            computing = [e for e in events if e.lane is Lane.COMPUTE]
            seen |= {
                Op.parse(e.name).kind
                for e in events
                if e.lane in (Lane.D2H, Lane.H2D)
                and any(c.device == e.device and c.start < e.end and e.start < c.end for c in computing)
            }
            if seen == {Kind.O, Kind.L}:
                break
        return seen

    return run_threads(plan, one)[0]


def on_lanes(trace: Any, lanes: Any = (Lane.D2H, Lane.H2D)) -> Any:
    """Names of the operations that ran on these lanes in the last step."""
    return {e.name for e in trace.steps[-1].events if e.lane in lanes}


def kinds_of(plan: Any) -> Any:
    return {op.kind for op in plan.schedule.operations}
