"""Plans for 4 and 8 devices from the measured profile: each device's program runs alone here, next to its prediction.

A device has its real parameters, gradients and activations; the others' messages come at their predicted times.  The
devices' traces together are the pipeline as it would be if every message were on time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import debubble as db
from debubble.costs import Cluster
from debubble.costs.files import units_from_dict
from debubble.ir import Kind, Lane, Op, OutOfMemoryError, RunOptions, Schedule, Trace, lower
from debubble.ir.trace import TraceStep
from debubble.models import Model
from debubble.plans import ModelOnCluster, Plan
from debubble.runtime import Pipeline
from debubble.runtime.memory.arena import ArenaError
from debubble.views import Scene, views
from debubble.views.comparison import as_dict, compare
from on_gpu.figures import Figures, pair
from on_gpu.machine import compared_hardware
from on_gpu.profiles import DTYPES
from on_gpu.settings import Config, Settings
from on_gpu.single_rank import SingleRankTransport

WARM_UP = 1
COMPUTE, TRANSFERS = (Lane.COMPUTE,), (Lane.D2H, Lane.H2D)


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    for devices, length, micro_batches in zip((4, 8), settings.lengths, settings.micro_batches, strict=True):
        profile = known.get("profile", {}).get(f"dense-{length}", {}).get("profile")
        if profile is None:
            figures.add(f"{devices}-devices", figures={"left_out": f"there is no profile of {length} tokens"})
            continue
        many = Many(settings, figures, profile, devices, length, micro_batches)
        figures.run(many.run, f"{devices}-devices")
        figures.run(many.chosen, f"{devices}-devices", "auto", needs=60)


@dataclass
class Many:
    """The plans for one number of devices."""

    settings: Settings
    figures: Figures
    profile: dict[str, Any]
    devices: int
    length: int
    micro_batches: int

    def __post_init__(self) -> None:
        self.config: Config = self.settings.dense
        self.options = RunOptions(dtype=self.settings.dtype, sequence_length=self.length)
        self.name = f"{self.devices}-devices"
        units = units_from_dict(self.profile)
        # Bytes that stay on the device are counted separately: the runtime's optimizer belongs to the caller.
        self.units = replace(units, units=tuple(replace(unit, static=0.0) for unit in units.units))

    def run(self) -> None:
        """1F1B, ZB-H1 and 1F1B with offload have the same stages, so each device is built once."""
        one_f_one_b = db.schedules["1f1b"](devices=self.devices, micro_batches=self.micro_batches)
        split = db.schedules["zb-h1"](devices=self.devices, micro_batches=self.micro_batches)
        plans = {"1f1b": self.plan(one_f_one_b), "zb-h1": self.plan(split), "offloaded": self.offloaded(one_f_one_b)}
        steps: dict[str, list[TraceStep]] = defaultdict(list)
        for device in self.settings.measured_devices.get(self.devices, range(self.devices)):
            if self.figures.remaining_seconds < 15:
                self.figures.add(self.name, f"device-{device}", figures={"left_out": "no time was left"})
                break
            for name, (figures, step) in run_device(plans, device, self.settings).items():
                self.figures.add(self.name, f"device-{device}", name, figures=figures)
                steps[name].append(step)
            if device == 0:
                in_arena = partial(self.in_arena, plans["offloaded"], device)
                self.figures.measure(in_arena, self.name, f"device-{device}", "offloaded, in an arena", needs=15)
        for name, parts in steps.items():
            if len(parts) == self.devices:
                self.joined(name, plans[name], parts)

    def in_arena(self, plan: Plan, device: int) -> dict[str, Any]:
        """Run a plan at the addresses of its arena, where these suffice, and report the allocator's figures."""
        try:
            ((figures, _),) = run_device({"": plan}, device, self.settings, arena=True).values()
        except ArenaError as error:
            return {"refused": str(error)}
        return figures

    def chosen(self) -> None:
        """Plan with `auto` for the states and 60% of 1F1B's activations; run only the busiest device."""
        one_f_one_b = self.plan(db.schedules["1f1b"](devices=self.devices, micro_batches=self.micro_batches))
        states = sum(float(unit.static) for unit in units_from_dict(self.profile).units) / self.devices
        limit = 1.2 * states + 0.6 * float(max(one_f_one_b.simulate().peak_memory))
        plan = db.plan(
            *self.model_on_cluster, micro_batches=self.micro_batches,
            memory_limit=limit, effort=2, profile=self.profile, dtype=self.settings.dtype, sequence_length=self.length,
        )  # fmt: skip
        busy = [sum(float(o.duration) for o in operations_of(plan, d, Lane.COMPUTE)) for d in range(plan.devices)]
        device = busy.index(max(busy))
        ((figures, _),) = run_device({"auto": plan}, device, self.settings, trains=True).values()
        self.figures.add(self.name, "auto", figures={"planner": plan.planner, "device": device, **figures})

    @property
    def model_on_cluster(self) -> ModelOnCluster:
        """The model, and the pipeline's devices."""
        cluster = Cluster.parse(f"{self.devices}x{compared_hardware(self.settings).name}")
        return ModelOnCluster(Model.from_hf(self.config), cluster)

    def plan(self, schedule: Schedule) -> Plan:
        """The schedule with equally many layers per stage."""
        layers = self.config["num_hidden_layers"]
        bounds = [0, *(1 + 2 * round(layers * s / schedule.stages) for s in range(1, schedule.stages)), 2 + 2 * layers]
        partition = [[(i, "none") for i in range(a, b)] for a, b in itertools.pairwise(bounds)]
        return Plan(
            planner="benchmark", schedule=schedule, lower_bound=0, options=self.options,
            model_on_cluster=self.model_on_cluster,
            costs=self.units.stage_costs(partition, schedule.placement), partition=self.units.planned(partition),
        )  # fmt: skip

    def offloaded(self, schedule: Schedule) -> Plan:
        """1F1B with offload under the tightest limit that it can keep on the first device."""
        plan = self.plan(offloading(schedule))
        peak = float(max(self.plan(schedule).simulate().peak_memory))
        for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            limited = replace(plan, costs=plan.costs.with_limit(share * peak))
            try:
                lower(limited.schedule, limited.costs)
            except OutOfMemoryError:
                continue
            return limited
        return plan

    def joined(self, name: str, plan: Plan, parts: Sequence[TraceStep]) -> None:
        """Compare all devices' programs together with the plan; save the pictures of one plan."""
        trace = Trace.join([Trace(devices=self.devices, steps=(step,)) for step in parts])
        self.figures.add(self.name, "together", name, figures=as_dict(compare(plan, trace)))
        if name == "offloaded" and self.devices == 4:
            folder = Path(self.figures.folder)
            scenes = Scene.pair(plan, trace)
            (folder / "plan-4-devices.html").write_bytes(views["html"](scenes))
            (folder / "plan-4-devices.perfetto.json").write_bytes(views["perfetto"](scenes))
            self.figures.add("pictures", figures=["plan-4-devices.html", "plan-4-devices.perfetto.json"])


def offloading(schedule: Schedule) -> Schedule:
    """Offload what waits long after its forward, and reload it next to the operation before its backward."""
    orders = []
    for order in schedule.orders:
        place = {op: i for i, op in enumerate(order)}
        leaves, returns = defaultdict(list), defaultdict(list)
        for op in order:
            if op.kind is Kind.F:
                back = place[schedule.backward_of(op.stage, op.micro_batch)]
                if back - place[op] > 3:
                    leaves[place[op]].append(Op(Kind.O, op.stage, op.micro_batch))
                    returns[back - 1].append(Op(Kind.L, op.stage, op.micro_batch))
        orders.append(tuple(o for i, op in enumerate(order) for o in (*returns[i], op, *leaves[i])))
    return replace(schedule, name=f"{schedule.name}-offloaded", orders=tuple(orders))


def operations_of(plan: Plan, device: int, *lanes: Lane) -> list[Any]:
    """Predicted operations on some lanes of a device."""
    return [o for o in plan.simulate().operations if o.device == device and o.lane in lanes]


def supply_of(settings: Settings, hidden: int, length: int) -> Any:
    """Random messages with about the size of activations and gradients."""
    shape = (1, length, hidden)
    forward = torch.randn(shape, device=settings.device, dtype=DTYPES[settings.dtype])
    backward = 1e-4 * torch.randn_like(forward)

    def supply(op: Op, buffer: torch.Tensor) -> None:
        buffer.copy_(forward if op.kind is Kind.RECV_F else backward)

    return supply


def run_device(
    plans: dict[str, Plan], device: int, settings: Settings, *, trains: bool = False, arena: bool = False
) -> dict[str, tuple[dict[str, Any], TraceStep]]:
    """Run one device's part of several plans with the same stages: figures, and the typical step's trace.

    Where it `trains`, AdamW steps the parameters after every step, or inside it where the plan says so.  With an
    `arena` steps are held to the device's address plan.
    """
    first = next(iter(plans.values()))
    length, model = first.options.sequence_length, first.model
    assert model is not None
    supply = supply_of(settings, model.hidden, length)
    transport = SingleRankTransport(lower(first.schedule, first.costs), device, supply)
    optimizer = partial(torch.optim.AdamW, lr=1e-5, fused=True) if trains else None
    on = torch.device(settings.device)
    pipeline = Pipeline(None, first, transport=transport, device=on, optimizer=optimizer, arena=arena)
    pipeline.measured.every_step = True
    tokens = torch.randint(model.vocab, (first.micro_batches, length + 1), generator=torch.Generator().manual_seed(0))
    results = {}
    for name, plan in plans.items():
        arrivals = {o.op: float(o.end) for o in operations_of(plan, device, Lane.RECV)}
        transport.follow(lower(plan.schedule, plan.costs), arrivals=arrivals)
        pipeline.switch_plan(plan)
        steps: list[TraceStep] = []
        memory: dict[str, Any] = {}
        for number in range(WARM_UP + settings.steps):
            memory = step_of(pipeline, tokens, settings, trains=trains)
            if number >= WARM_UP:
                steps.append(replace(pipeline.measured.trace().steps[0], step=1))
        typical = sorted(steps, key=lambda step: step.makespan)[len(steps) // 2]
        predicted, measured = plan.simulate().peak_memory[device] - plan.costs.static_of(device), pipeline.measured
        memory |= {
            "activations": pair(predicted, measured.peak_activation), "offloaded": measured.peak_offloaded,
        }  # fmt: skip
        if measured.activations.arena is not None:
            memory["arena"] = measured.activations.arena.size
        results[name] = ({**figures_of(plan, device, typical), "memory": memory}, typical)
    del pipeline
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return results


def step_of(pipeline: Pipeline, tokens: torch.Tensor, settings: Settings, *, trains: bool) -> dict[str, float]:
    """One step, and the figures of torch's allocator."""
    memory: dict[str, float] = {}
    if settings.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    pipeline.step(tokens)
    if settings.device == "cuda":
        torch.cuda.synchronize()
        memory["allocated_in_step"] = torch.cuda.max_memory_allocated() - before
        memory["reserved"] = torch.cuda.max_memory_reserved()
    if trains:
        pipeline.optimizer_step()
    for parameter in pipeline.parameters():
        parameter.grad = None
    return memory


Interval = tuple[float, float]


def figures_of(plan: Plan, device: int, step: TraceStep) -> dict[str, Any]:
    """Times of a device's program: operations by kind, span, and the hidden fraction of transfers."""
    predicted = operations_of(plan, device, Lane.COMPUTE, *TRANSFERS)
    kinds: dict[str, Any] = {}
    for kind in dict.fromkeys(o.op.kind for o in predicted):
        expected = [float(o.duration) for o in predicted if o.op.kind is kind]
        taken = [e.end - e.start for e in step.events if Op.parse(e.name).kind is kind]
        kinds[kind.value] = pair(sum(expected) / len(expected), sum(taken) / len(taken))

    def intervals(operations: Sequence[Any], *lanes: Lane) -> list[Interval]:
        return [(float(o.start), float(o.end)) for o in operations if o.lane in lanes]

    computes, moves = ([intervals(ops, *lanes) for ops in (predicted, step.events)] for lanes in (COMPUTE, TRANSFERS))
    spans = [max(end for _, end in side) - min(start for start, _ in side) for side in computes]
    shares = [hidden(moved, computed) for moved, computed in zip(moves, computes, strict=True)]
    return {
        "schedule": plan.schedule.name, "operations": kinds, "span": pair(*spans), "hidden_transfers": pair(*shares),
    }  # fmt: skip


def hidden(transfers: Sequence[Interval], compute: Sequence[Interval]) -> float:
    """Fraction of the transfers' time during which an operation computes; 1 without transfers."""
    total = sum(end - start for start, end in transfers)
    overlaps = (
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in transfers
        for other_start, other_end in compute
    )
    return sum(overlaps) / total if total else 1.0
