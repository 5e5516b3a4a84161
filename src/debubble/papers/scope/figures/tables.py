"""SCOPE's evaluation, repeated with a cost model.

The poster gives speed-ups and utilization on up to 16,384 Ascend 910 devices, but no configuration.  Ours: 16 pipeline
stages, tensor parallelism 8, the rest data parallelism with ZeRO-1, sequences of 4,096 tokens (2,048 for models with
learned positions), and the smallest micro-batch at which 1F1B on the even partition needs recomputation.  A step has 16
micro-batches; where the number of devices varies, the number of sequences per step is fixed instead.

All planners use the same costs and may recompute what the table says: full layers (`full`), also the cheap operators
of a layer (`selective, full`), or any subset of operators (`all`).  This can confirm the order of the planners and the
gain of each axis, but not absolute times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from debubble.costs import Cluster, StepTail, model_units
from debubble.costs.flops import Utilization
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, Placement, RunOptions
from debubble.models import Model, models
from debubble.papers.printed import PrintedPaper
from debubble.papers.registry import Cell, Table
from debubble.papers.scope.planner import DUAL, TRI
from debubble.planners import ModelUnits, Problem, planners
from debubble.planners.baselines.even_splits import megatron_schedule
from debubble.planners.partitioning.balance import balanced_counts, even_counts
from debubble.planners.partitioning.local_search import PartitionSearch
from debubble.planners.problem import Solution
from debubble.simulator import Repricer, simulate

PAPER = PrintedPaper.load("scope")

DEVICES, DEVICE = 16_384, "Ascend-910-64GB"
PIPELINE = 16
TENSOR = 8
EFFORT = 2.0
"""Search effort of every planner; see `debubble plan --effort`."""
OPERATORS: Mapping[str, tuple[str, ...] | None] = {"full": DUAL, "selective, full": TRI, "all": None}
"""Allowed strategies besides `none`; None: every subset of a layer's operators."""


MODELS: Mapping[str, Model] = {
    "LLaMA-70B": models["llama2-70b"],
    **{name: Model.from_hf(config) for name, config in PAPER.printed["models"].items()},
}
MULTIMODAL = "Multi-modal-70B"
"""LLaMA-70B after a vision tower; it exists only as units, not as a Model."""


@dataclass(frozen=True)
class Case:
    """A case of the evaluation: a model, a number of devices, and the allowed recomputation."""

    model: str
    devices: int = DEVICES
    chunks: int = 1
    operators: str = "all"
    sequences: int | None = None
    """Sequences per step; None: those of 16 micro-batches."""

    @property
    def pipeline(self) -> int:
        """Pipeline stages: 16, or fewer with too few devices."""
        return min(PIPELINE, self.devices // TENSOR)


@dataclass(frozen=True, kw_only=True)
class PlannerOutcome:
    """The result of a planner for a case."""

    seconds: float
    """Step time, including gradient reduction and optimizer."""
    memory: float
    """Mean peak over the devices, as a fraction of their memory."""
    mfu: float | None
    """Model FLOPs utilization; None if the units have no Model."""


Ask = Callable[[str, Case], PlannerOutcome | None]
"""Function of a planner's name and a case; returns None if nothing fits."""


@functools.cache
def answer(planner: str, case: Case) -> PlannerOutcome | None:
    """Plan and simulate a case; None if nothing fits."""
    problem = problem_of(case)
    try:
        solution = PLANNERS[planner](problem) if planner in PLANNERS else planners[planner].find(problem)
        timeline = simulate(solution.schedule, solution.costs)
    except InfeasibleError:
        return None
    seconds = float(problem.step_time(timeline))
    capacity = Cluster.parse(f"{case.devices}x{DEVICE}").types[0].memory
    shares = [float(peak) / capacity for peak in timeline.peak_memory]
    return PlannerOutcome(seconds=seconds, memory=sum(shares) / len(shares), mfu=_mfu(problem, seconds))


LONG_STEP_FACTOR = 8
"""Factor on the number of micro-batches that makes the preparation bubble B_P negligible."""


def two_bubbles(problem: Problem) -> Solution:
    """SCOPE without B_P: the plan for a step with LONG_STEP_FACTOR times the micro-batches."""
    amortized = planners["scope"].find(replace(problem, micro_batches=LONG_STEP_FACTOR * problem.micro_batches))
    schedule = megatron_schedule(problem, amortized.schedule.placement.chunks)
    fused = amortized.schedule.fused_recompute
    return replace(amortized, schedule=replace(schedule, fused_recompute=fused))


def every_layer(split: Callable[[Units, int], list[int]], problem: Problem) -> Solution:
    """Megatron's schedule on one partition with `--recompute-granularity full`: every layer recomputes in full."""
    assert isinstance(problem.workload, ModelUnits), "the poster's models are units"
    units, repricer = problem.workload.units, Repricer(megatron_schedule(problem, problem.chunks or 1))
    partition = Partition.cut(units, split(units, problem.devices * (problem.chunks or 1)), strategy="full")
    return PartitionSearch(problem, units, repricer, strategies=("full",)).priced(partition).solution


PLANNERS: Mapping[str, Callable[[Problem], Solution]] = {
    "scope, two bubbles": two_bubbles,
    "megatron-even, every layer": functools.partial(every_layer, even_counts),
    "pipedream, every layer": functools.partial(every_layer, balanced_counts),
}
"""Additional readings of the poster's planners, which are not in the registry."""


def _mfu(problem: Problem, seconds: float) -> float | None:
    if problem.tail is None:
        return None
    model, cluster, options = problem.tail.model, problem.tail.cluster, problem.tail.options
    tokens = problem.micro_batches * options.micro_batch_size * options.data * options.sequence_length
    return Utilization.of_run(model, cluster, options, devices=cluster.count).mfu(tokens / seconds)


def problem_of(case: Case) -> Problem:
    """The case's problem at the smallest micro-batch where 1F1B on the even partition needs recomputation."""
    if case.model == MULTIMODAL:
        problem, units = _problem_and_units(replace(case, model="LLaMA-70B"))
        return replace(problem, workload=ModelUnits(_after_tower(units)), tail=None)
    return _problem_and_units(case)[0]


def _problem_and_units(case: Case) -> tuple[Problem, Units]:
    """The problem and units of a published model, restricted to the strategies of the case."""
    size = 1
    problem, units = _with_micro_batch(case, size)
    while _fits_without_recomputation(problem, units):
        size *= 2
        problem, units = _with_micro_batch(case, size)
    units = _restricted(units, OPERATORS[case.operators])
    return replace(problem, workload=ModelUnits(units)), units


def _with_micro_batch(case: Case, size: int) -> tuple[Problem, Units]:
    """The problem and its units for a micro-batch size."""
    model = MODELS[case.model]
    data = case.devices // (case.pipeline * TENSOR)
    options = RunOptions(
        micro_batch_size=size, sequence_length=min(4096, model.positions or 4096), tensor=TENSOR, data=data,
        zero=1, expert=8 if model.experts else 1,
    )  # fmt: skip
    cluster = Cluster.parse(f"{case.devices}x{DEVICE}")
    units = model_units(model, cluster, options, pipeline=case.pipeline)
    problem = Problem(
        devices=case.pipeline,
        micro_batches=PIPELINE if case.sequences is None else case.sequences // (data * size),
        workload=ModelUnits(units),
        chunks=case.chunks,
        effort=EFFORT,
        tail=StepTail(model=model, cluster=cluster, options=options, pipeline=case.pipeline),
    )
    return problem, units


def _restricted(units: Units, strategies: tuple[str, ...] | None) -> Units:
    """The units restricted to `none` and these strategies."""
    if strategies is None:
        return units
    names = ("none", *strategies)
    restricted = (replace(u, strategies={n: s for n, s in u.strategies.items() if n in names}) for u in units.units)
    return replace(units, units=tuple(restricted))


def _after_tower(units: Units) -> Units:
    """A vision tower of 32 lighter layers in front of a language model: layer types of different cost."""
    first, *body = units.units
    tower = (
        replace(
            unit,
            type=f"vision-{unit.type}",
            forward=unit.forward * 0.4,
            backward_input=unit.backward_input * 0.4,
            backward_weight=unit.backward_weight * 0.4,
            static=unit.static * 0.25,
            strategies={
                name: replace(s, activation=s.activation * 0.5, recompute=s.recompute * 0.4)
                for name, s in unit.strategies.items()
            },
        )
        for unit in body[:64]
    )
    return replace(units, units=(first, *tower, *body))


def _fits_without_recomputation(problem: Problem, units: Units) -> bool:
    partition = Partition.cut(units, even_counts(units, problem.devices))
    costs = units.stage_costs(partition, Placement.linear(problem.devices))
    peaks = Repricer(megatron_schedule(problem, 1)).peak_memory(costs, fused_recompute=frozenset())
    return all(peak <= limit for peak, limit in zip(peaks, problem.limits, strict=True))


def _ratio(base: PlannerOutcome | None, other: PlannerOutcome | None) -> float | None:
    return None if base is None or other is None else round(base.seconds / other.seconds, 3)


EVEN, ON_1F1B = "Megatron-Even", "Megatron-Even on 1F1B"
EVERY_LAYER = ", every layer"
"""Suffix of planners that recompute every layer; without it they recompute as few layers as needed to fit."""
END_TO_END: Sequence[tuple[str, str, str, int, str, float | None]] = [
    (name, planner, operators, chunks, over, speed_up[0] if speed_up else None)
    for name, planner, operators, chunks, over, *speed_up in PAPER.printed["end-to-end"]
]
"""Name, planner, allowed operators, chunks, reference, and the poster's speed-up."""


def end_to_end(ask: Ask) -> Table:
    """LLaMA-175B on all devices: speed-up of every planner of the poster over Megatron-Even."""
    rows: list[tuple[Cell, ...]] = []
    for name, planner, operators, chunks, over, poster in END_TO_END:
        case = Case("LLaMA-175B", chunks=chunks, operators=operators)
        base = Case("LLaMA-175B", chunks=1 if over == ON_1F1B else chunks, operators="full")
        ours = (
            _ratio(ask(f"megatron-even{which}", base), ask(asked, case))
            for which, asked in ((EVERY_LAYER, planner), ("", planner.removesuffix(EVERY_LAYER)))
        )
        rows.append((name, operators, "interleaved" if chunks > 1 else "1F1B", over, poster, *ours))
    return PAPER.table("end-to-end", rows, devices=DEVICES)


def _gains(ask: Ask, case: Case) -> tuple[float | None, ...]:
    """Speed-ups of tri over Megatron-Even with every layer and with the fewest recomputed; 1F1B, then interleaved."""
    return tuple(
        _ratio(
            ask(f"megatron-even{which}", replace(case, chunks=chunks, operators="full")),
            ask("scope", replace(case, chunks=chunks, operators="selective, full")),
        )
        for chunks in (1, 2)
        for which in (EVERY_LAYER, "")
    )


GAINS = ("1F1B, tri", "over the fewest", "interleaved, tri", "interleaved, over the fewest")


def scalability(ask: Ask) -> Table:
    """LLaMA-175B on 1,024 to 16,384 devices."""
    rows: list[tuple[Cell, ...]] = []
    for devices in (1024, 8192, DEVICES):
        case = Case("LLaMA-175B", devices=devices, operators="full", sequences=8192)
        even = ask(f"megatron-even{EVERY_LAYER}", case)
        tri = ask("scope", replace(case, chunks=2, operators="selective, full"))
        rows.append((f"{devices:,}", "1.18 to 1.20", *_gains(ask, case), _percent(even, "mfu"), _percent(tri, "mfu")))
    return PAPER.table("scalability", rows)


def generality(ask: Ask) -> Table:
    """Every model of the poster on all devices."""
    rows: list[tuple[Cell, ...]] = []
    for name in (*MODELS, MULTIMODAL):
        model = MODELS.get(name)
        size = None if model is None else round(model.parameters / 1e9, 1)
        rows.append((name, size, "1.20 to 1.31", *_gains(ask, Case(name, operators="full"))))
    return PAPER.table(
        "generality",
        tuple(rows),
        devices=DEVICES,
        models=MODELS["Pangu-alpha-230B"].parameters / 1e9,
    )


def memory(ask: Ask) -> Table:
    """The fraction of device memory that is used on 64 and on 128 devices."""
    rows: list[tuple[Cell, ...]] = []
    for name, devices in itertools.product(("LLaMA-70B", "LLaMA-175B", "Qwen2-72B"), (64, 128)):
        case = Case(name, devices=devices, operators="full")
        evens = [ask(f"megatron-even{which}", case) for which in (EVERY_LAYER, "")]
        tri = ask("scope", replace(case, operators="selective, full"))
        gains = (None if even is None or tri is None else round(tri.memory / even.memory, 2) for even in evens)
        used = (_percent(even, "memory") for even in evens)
        cells = ("64% to 75%", *used, "83% to 92%", _percent(tri, "memory"), "1.20 to 1.42", *gains)
        rows.append((name, devices, *cells))
    return PAPER.table("memory", rows)


def _percent(outcome: PlannerOutcome | None, figure: str) -> str | None:
    """Format a field of an outcome as the poster prints it, in percent."""
    share = None if outcome is None else getattr(outcome, figure)
    return None if share is None else f"{100 * share:.1f}%"
