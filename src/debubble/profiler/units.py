"""Costs of each unit of a model on one device: times and bytes, measured with the runtime's own stages.

A slice of the model (embedding, a few layers, head) runs forward and backward again and again, two micro-batches in
flight, every unit as a stage of its own: so each runs after its neighbours, as in a pipeline, not on a warm cache.
Repetitions go round the recomputation strategies, so that a disturbance meets all of them alike.  Times are between
marks, as in a run's trace: nobody waits for a GPU between two units, so what the host hides of its launches in a run is
hidden here too.  Bytes are the runtime's own count.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from debubble.costs.analytical.operators import subsets
from debubble.costs.unit import Strategy, Unit
from debubble.ir import Number, PlannedUnit, RunOptions
from debubble.models.architecture import Layer
from debubble.models.config import ModelConfig
from debubble.profiler.device_memory import WorkspaceMeter
from debubble.runtime.execution.lanes import Mark, lanes_of
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.host import HostMemory
from debubble.runtime.memory.recomputation import run_without_recompute
from debubble.runtime.models.build import add_adapters, build_stage
from debubble.runtime.models.lora import new_adapters
from debubble.runtime.models.stage import SavePolicy, Stage
from debubble.runtime.models.units import MicroBatch, UnitModule
from debubble.runtime.parameters.stage_parameters import accumulate

MICRO_BATCHES_IN_FLIGHT = 2
"""Micro-batches between whose forwards and backwards others run."""
LAYERS_PER_KIND = 2
"""Layers of every kind that are measured: those with a mixture of experts or a window apart."""
WARM_UP_REPETITIONS = 3
"""First repetitions, which do not count."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class UnitSamples:
    """Measurements of one unit under one strategy: durations in seconds, by what was timed, and bytes."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kept: int = 0
    """Bytes kept after the forward."""
    kept_after_input: int = 0
    """Bytes kept after the backward for inputs."""

    def median(self, what: str) -> float:
        """Median seconds of `forward`, `backward`, `weight` or `recompute`."""
        return statistics.median(self.times[what])

    def middle_half(self, what: str) -> float:
        """Seconds between the lower and the upper quartile."""
        lower, _, upper = statistics.quantiles(self.times[what], n=4, method="inclusive")
        return upper - lower


Kind = tuple[str, Layer | None]
"""Units of the same kind cost the same: the type, and what the layer is made of."""


def kind_of(unit: PlannedUnit, config: Mapping[str, Any]) -> Kind:
    """The kind of one of the model's units."""
    return unit.type, None if unit.layer is None else ModelConfig.from_hf(config).per_layer[unit.layer]


def measured_layers(config: Mapping[str, Any]) -> list[int]:
    """The first layers of every kind."""
    alike: dict[Layer, list[int]] = defaultdict(list)
    for index, layer in enumerate(ModelConfig.from_hf(config).per_layer):
        alike[layer].append(index)
    return sorted(index for layers in alike.values() for index in layers[:LAYERS_PER_KIND])


def measured_strategies(kind: str, model: ModelConfig) -> tuple[str, ...]:
    """The ways to recompute a type of unit that are measured: all that the formulas of costs/operators.py have."""
    match kind:
        case "attention":
            return "none", "full", *subsets(("norm", "projections", "core"))
        case "mlp":
            return "none", "full", *subsets(("norm", "mlp", "multiply" if model.gated else "activation"))
        case "layer":
            return "none", "full"
        case _:
            return ("none",)


Measurements = dict[tuple[int, str], UnitSamples]
"""Measurements by the unit's place in the slice and its strategy.

`split` is no recomputation with a split backward; `layer`, at the place of a layer's attention, is the full
recomputation of both halves together.
"""


class UnitSequence:
    """Units in a row that are measured, on one device.

    Args:
        units: The modules.
        planned: Type and layer of each.
        ways: The strategies of each that are measured.
        inputs: Input of the first.
        targets: Targets of the loss of the last.
        device: Where they are measured.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        planned: Sequence[PlannedUnit],
        ways: Sequence[Sequence[str]],
        *,
        inputs: Tensor,
        targets: Tensor,
        device: torch.device,
    ) -> None:
        self.planned, self.ways = planned, ways
        self._lanes = lanes_of(device)
        self._timings: list[tuple[list[float], Mark, Mark]] = []
        self.device, self.ledger = self._lanes.device, Ledger(device)
        self.workspace = WorkspaceMeter(self.device)
        self.units = [unit.to(device) for unit in units]
        for unit in self.units:
            unit.attach_ledger(self.ledger)
        self._sums: dict[Tensor, Tensor] = {}
        """Gradients in fp32 where the units compute in another dtype, as a run sums them."""
        self.inputs, self.targets = inputs.to(device), targets.to(device)

    def measure(self, *, repetitions: int, warm_up: int = WARM_UP_REPETITIONS) -> Measurements:
        """Round after round through all strategies, after `warm_up` rounds that do not count."""
        measured: Measurements = defaultdict(UnitSamples)
        ways = self.ways
        alone, layers = range(len(ways)), [n for n, unit in enumerate(self.planned) if unit.type != "mlp"]
        for repetition in range(warm_up + repetitions):
            if repetition == warm_up:
                measured = defaultdict(UnitSamples)
            for way in range(max(map(len, ways))):
                strategies = [own[way % len(own)] for own in ways]
                self._run(alone, strategies, [measured[key] for key in enumerate(strategies)])
            self._run(alone, ["none"] * len(ways), [measured[n, "split"] for n in alone], split=True)
            if len(layers) < len(ways):
                full = ["full" if "full" in own else "none" for own in ways]
                self._run(layers, full, [measured[n, "layer"] for n in layers])
        return measured

    def offload_bandwidth(self, *, host: HostMemory, repetitions: int) -> float:
        """Bytes per second that a thread moves out and back next to the thread that computes: a CPU's offload."""
        stage = Stage(self.units, [replace(u, strategy="none") for u in self.planned], self.ledger)
        gradient = torch.ones((), device=self.device)
        times: list[float] = []

        def forward(j: int) -> None:
            stage.forward(j, self.inputs.clone(), MicroBatch(targets=self.targets.clone(), scale=1.0, seed=j))

        def move() -> None:
            start = perf_counter()
            buffer = stage.offload(0, 1.0, host.take)
            stage.reload(0, buffer)
            host.give_back(buffer)
            times.append((perf_counter() - start) / 2)

        for _ in range(WARM_UP_REPETITIONS + repetitions):
            forward(0)
            size = self.ledger.bytes
            mover = Thread(target=move)
            mover.start()
            forward(1)
            stage.backward(1, gradient, split=False)
            mover.join()
            stage.backward(0, gradient, split=False)
        return size / statistics.median(times[WARM_UP_REPETITIONS:])

    def _run(
        self, begins: Sequence[int], strategies: Sequence[str], samples: Sequence[UnitSamples], *, split: bool = False
    ) -> None:
        """Once forward and backward with every unit's strategy, in stages that begin there, adding to their samples."""
        planned = [PlannedUnit(u.type, u.layer, s) for u, s in zip(self.planned, strategies, strict=True)]
        stages = [Stage(self.units[a:b], planned[a:b], self.ledger) for a, b in pairwise((*begins, len(planned)))]
        self._lanes.start_step()
        for j in range(MICRO_BATCHES_IN_FLIGHT):
            self._forward(j, stages, samples)
        for j in range(MICRO_BATCHES_IN_FLIGHT):
            self._backward(j, stages, samples, split=split)
            if split:
                for stage, sample in zip(stages, samples, strict=True):
                    with self._time(sample, "weight"):
                        stage.backward_weight(j)
                        self._sum_gradients(stage)
        moments = self._lanes.seconds([mark for _, *marks in self._timings for mark in marks])
        for (times, _, _), start, end in zip(self._timings, moments[::2], moments[1::2], strict=True):
            times.append(end - start)
        self._timings.clear()

    def _forward(self, j: int, stages: Sequence[Stage], samples: Sequence[UnitSamples]) -> None:
        x = self.inputs.clone()  # storages are counted once
        micro_batch = MicroBatch(targets=self.targets.clone(), scale=1 / self.targets.numel(), seed=j)
        for stage, sample in zip(stages, samples, strict=True):
            before = self.ledger.bytes
            with self._time(sample, "forward"):
                x = stage.forward(j, x, micro_batch, SavePolicy(recomputing=len(stage.units)))
            sample.kept = self.ledger.bytes - before

    def _backward(self, j: int, stages: Sequence[Stage], samples: Sequence[UnitSamples], *, split: bool) -> None:
        gradient: Tensor | None = torch.ones((), device=self.device)
        for stage, sample in zip(reversed(stages), reversed(samples), strict=True):
            with self._time(sample, "recompute"):
                stage.recompute(j)
            before = self.ledger.bytes
            assert gradient is not None
            with self._time(sample, "backward"):
                gradient = stage.backward(j, gradient, split=split)
                self._sum_gradients(stage)
            sample.kept_after_input = sample.kept + self.ledger.bytes - before

    def _sum_gradients(self, stage: Stage) -> None:
        for parameter in (p for unit in stage.units for p in unit.parameters()):
            if parameter.grad is not None and parameter.dtype not in (torch.float32, torch.float64):
                self._sums[parameter] = accumulate(self._sums.get(parameter), parameter.grad, torch.float32)
                parameter.grad = None

    @contextmanager
    def _time(self, sample: UnitSamples, what: str) -> Iterator[None]:
        start = self._lanes.mark()
        with self.workspace.operation():
            yield
        self._timings.append((sample.times[what], start, self._lanes.mark()))


class ModelSlice(UnitSequence):
    """The part of the model that is measured, on one device."""

    def __init__(self, config: Mapping[str, Any], options: RunOptions, device: torch.device) -> None:
        model, layers = ModelConfig.from_hf(config), measured_layers(config)
        planned = [u for u in model.units if u.layer is None or u.layer in layers]
        dtype = DTYPES[options.dtype]
        built = build_stage(config, planned, dtype=dtype)
        if options.lora:
            add_adapters(built, new_adapters(built, model.family, rank=options.lora), model, dtype=dtype)
        size = (options.micro_batch_size, options.sequence_length + 1)
        tokens = torch.randint(256, size, generator=torch.Generator().manual_seed(0))
        ways = [measured_strategies(unit.type, model) for unit in planned]
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        super().__init__(built, planned, ways, inputs=inputs, targets=targets, device=device)

    @property
    def boundary(self) -> Tensor:
        """A tensor such as stages hand on."""
        x: Tensor = self.units[0](self.inputs, MicroBatch(), run_without_recompute)
        return x.detach()


def merge(parts: Sequence[Measurements]) -> Measurements:
    """The samples of several processes together."""
    whole: Measurements = {}
    for key, first in parts[0].items():
        times = {what: [t for part in parts for t in part[key].times[what]] for what in first.times}
        whole[key] = UnitSamples(times, first.kept, first.kept_after_input)
    return whole


def spread_of(measured: Measurements) -> float:
    """How far repeated forwards and backwards without recomputation differ: their middle half over their medians."""
    samples = [(each, what) for (_, way), each in measured.items() if way == "none" for what in ("forward", "backward")]
    return sum(each.middle_half(what) for each, what in samples) / sum(each.median(what) for each, what in samples)


def costs_of(
    planned: Sequence[PlannedUnit], measured: Measurements, *, static: Sequence[float], config: Mapping[str, Any]
) -> dict[Kind, Unit]:
    """The unit of each kind: the mean over the measured layers.

    A layer that recomputes in full needs its attention's last product again, which a half alone does
    not: that time is the attention's.
    """
    found: dict[Kind, list[Unit]] = defaultdict(list)
    for index, unit in enumerate(planned):
        cost = measured_unit(unit, samples_at(index, measured), static=static[index])
        strategies = cost.strategies
        if unit.type == "attention":
            both = measured[index, "layer"].median("recompute") - measured[index + 1, "full"].median("recompute")
            recompute = max(both, float(strategies["full"].recompute))
            cost = replace(cost, strategies={**strategies, "full": replace(strategies["full"], recompute=recompute)})
        elif unit.type == "mlp":
            beyond = measured[index - 1, "layer"].kept - measured[index - 1, "full"].kept
            cost = replace(cost, strategies={**strategies, "full": replace(strategies["full"], after_full=beyond)})
        found[kind_of(unit, config)].append(cost)
    return {kind: _mean(units) for kind, units in found.items()}


def samples_at(index: int, measured: Measurements) -> dict[str, UnitSamples]:
    """The samples of the unit at a place by its strategies, and `split`."""
    return {way: samples for (place, way), samples in measured.items() if place == index and way != "layer"}


def measured_unit(planned: PlannedUnit, samples: Mapping[str, UnitSamples], *, static: float) -> Unit:
    """The costs of a unit by its samples.

    The backward for inputs is what the whole backward takes beyond the weights' part, so that their sum is what most
    schedules run.
    """
    whole, split = samples["none"], samples["split"]
    weight = split.median("weight")
    recomputing = {way: each for way, each in samples.items() if way not in ("none", "split")}
    return Unit(
        type=planned.type,
        layer=planned.layer,
        forward=whole.median("forward"),
        backward_input=max(0.0, whole.median("backward") - weight),
        backward_weight=weight,
        static=static,
        strategies={
            "none": Strategy(whole.kept),
            **{way: Strategy(each.kept, each.median("recompute")) for way, each in recomputing.items()},
        },
        activation_after_input=split.kept_after_input,
    )


def _mean(units: Sequence[Unit]) -> Unit:
    first = units[0]

    def mean(values: Iterable[Number]) -> float:
        return float(sum(values)) / len(units)

    return replace(
        first,
        forward=mean(u.forward for u in units),
        backward_input=mean(u.backward_input for u in units),
        backward_weight=mean(u.backward_weight for u in units),
        strategies={
            name: replace(strategy, recompute=mean(u.strategies[name].recompute for u in units))
            for name, strategy in first.strategies.items()
        },
    )
