"""Costs of a model's units on one device: times and bytes, measured with the runtime's stages.

A slice of the model (embedding, a few layers, head) runs forward and backward repeatedly, with two micro-batches in
flight and every unit as a separate stage: so a unit runs after its neighbors, as in a pipeline, not on a warm cache.
Repetitions alternate between recomputation strategies, so that disturbances affect all of them.  Times are between
marks without synchronizing the GPU: kernel launches are hidden as in a run.  Bytes are the runtime's count.
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
"""Micro-batches in flight: forwards of all precede the backwards."""
LAYERS_PER_KIND = 2
"""Number of layers per kind that are measured; layers with experts or a window are separate kinds."""
WARM_UP_REPETITIONS = 3
"""First repetitions, which are discarded."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class UnitSamples:
    """Measurements of one unit with one strategy: seconds by phase, and bytes."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    saved_bytes: int = 0
    """Bytes saved by the forward."""
    bytes_after_input: int = 0
    """Bytes that remain after the backward for inputs."""

    def median(self, phase: str) -> float:
        """Median seconds of `forward`, `backward`, `weight` or `recompute`."""
        return statistics.median(self.times[phase])

    def interquartile_range(self, phase: str) -> float:
        """Seconds between the lower and the upper quartile."""
        lower, _, upper = statistics.quantiles(self.times[phase], n=4, method="inclusive")
        return upper - lower


Kind = tuple[str, Layer | None]
"""The type of a unit and the description of its layer; units of the same kind have the same costs."""


def kind_of(unit: PlannedUnit, config: Mapping[str, Any]) -> Kind:
    """The kind of a unit of the model."""
    return unit.type, None if unit.layer is None else ModelConfig.from_hf(config).per_layer[unit.layer]


def measured_layers(config: Mapping[str, Any]) -> list[int]:
    """The indices of the layers to measure: the first ones of every kind."""
    equal: dict[Layer, list[int]] = defaultdict(list)
    for index, layer in enumerate(ModelConfig.from_hf(config).per_layer):
        equal[layer].append(index)
    return sorted(index for layers in equal.values() for index in layers[:LAYERS_PER_KIND])


def measured_strategies(kind: str, model: ModelConfig) -> tuple[str, ...]:
    """The strategies of a type of unit to measure: all that costs/analytical/operators.py prices."""
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
"""Measurements by the unit's index in the slice and its strategy.

Strategy `split` is no recomputation with a split backward; `layer`, at the index of a layer's attention, is the full
recomputation of both halves together.
"""


class UnitSequence:
    """Consecutive units to be measured on one device.

    Args:
        units: The modules.
        planned: Their types and layers.
        strategies: Per unit, the strategies to measure.
        inputs: Input of the first unit.
        targets: Targets of the loss of the last unit.
        device: The device.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        planned: Sequence[PlannedUnit],
        strategies: Sequence[Sequence[str]],
        *,
        inputs: Tensor,
        targets: Tensor,
        device: torch.device,
    ) -> None:
        self.planned, self.strategies = planned, strategies
        self._lanes = lanes_of(device)
        self._timings: list[tuple[list[float], Mark, Mark]] = []
        self.device, self.ledger = self._lanes.device, Ledger(device)
        self.workspace = WorkspaceMeter(self.device)
        self.units = [unit.to(device) for unit in units]
        for unit in self.units:
            unit.attach_ledger(self.ledger)
        self._sums: dict[Tensor, Tensor] = {}
        """Gradients in fp32 of parameters in another dtype, which are accumulated as in a run."""
        self.inputs, self.targets = inputs.to(device), targets.to(device)

    def measure(self, *, repetitions: int, warm_up: int = WARM_UP_REPETITIONS) -> Measurements:
        """Measure all strategies in every repetition, after `warm_up` repetitions that are discarded."""
        measured: Measurements = defaultdict(UnitSamples)
        count = len(self.planned)
        units, layers = range(count), [n for n, unit in enumerate(self.planned) if unit.type != "mlp"]
        for repetition in range(warm_up + repetitions):
            if repetition == warm_up:
                measured = defaultdict(UnitSamples)
            for index in range(max(map(len, self.strategies))):
                chosen = [strategies[index % len(strategies)] for strategies in self.strategies]
                self._run(units, chosen, [measured[key] for key in enumerate(chosen)])
            self._run(units, ["none"] * count, [measured[n, "split"] for n in units], split=True)
            if len(layers) < count:
                full = ["full" if "full" in strategies else "none" for strategies in self.strategies]
                self._run(layers, full, [measured[n, "layer"] for n in layers])
        return measured

    def offload_bandwidth(self, *, host: HostMemory, repetitions: int) -> float:
        """Bytes per second that a CPU thread offloads and reloads while another thread computes."""
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
        """Run forward and backward once, in stages that start at the units `begins`, and add to the stages' samples."""
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
            sample.saved_bytes = self.ledger.bytes - before

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
            sample.bytes_after_input = sample.saved_bytes + self.ledger.bytes - before

    def _sum_gradients(self, stage: Stage) -> None:
        for parameter in (p for unit in stage.units for p in unit.parameters()):
            if parameter.grad is not None and parameter.dtype not in (torch.float32, torch.float64):
                self._sums[parameter] = accumulate(self._sums.get(parameter), parameter.grad, torch.float32)
                parameter.grad = None

    @contextmanager
    def _time(self, sample: UnitSamples, phase: str) -> Iterator[None]:
        start = self._lanes.mark()
        with self.workspace.operation():
            yield
        self._timings.append((sample.times[phase], start, self._lanes.mark()))


class ModelSlice(UnitSequence):
    """The slice of a model that is measured: embedding, some layers of every kind, head."""

    def __init__(self, config: Mapping[str, Any], options: RunOptions, device: torch.device) -> None:
        model, layers = ModelConfig.from_hf(config), measured_layers(config)
        planned = [u for u in model.units if u.layer is None or u.layer in layers]
        dtype = DTYPES[options.dtype]
        built = build_stage(config, planned, dtype=dtype)
        if options.lora:
            add_adapters(built, new_adapters(built, model.family, rank=options.lora), model, dtype=dtype)
        size = (options.micro_batch_size, options.sequence_length + 1)
        tokens = torch.randint(256, size, generator=torch.Generator().manual_seed(0))
        strategies = [measured_strategies(unit.type, model) for unit in planned]
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        super().__init__(built, planned, strategies, inputs=inputs, targets=targets, device=device)

    @property
    def boundary(self) -> Tensor:
        """A tensor like those that stages send to each other."""
        x: Tensor = self.units[0](self.inputs, MicroBatch(), run_without_recompute)
        return x.detach()


def merge(of_ranks: Sequence[Measurements]) -> Measurements:
    """Merge the samples of several processes."""
    merged: Measurements = {}
    for key, first in of_ranks[0].items():
        times = {phase: [t for measured in of_ranks for t in measured[key].times[phase]] for phase in first.times}
        merged[key] = UnitSamples(times, first.saved_bytes, first.bytes_after_input)
    return merged


def spread_of(measured: Measurements) -> float:
    """Interquartile range over median of forwards and backwards without recomputation, summed over units."""
    phases = ("forward", "backward")
    samples = [(s, phase) for (_, strategy), s in measured.items() if strategy == "none" for phase in phases]
    return sum(s.interquartile_range(phase) for s, phase in samples) / sum(s.median(phase) for s, phase in samples)


def costs_of(
    planned: Sequence[PlannedUnit], measured: Measurements, *, static: Sequence[float], config: Mapping[str, Any]
) -> dict[Kind, Unit]:
    """The unit of every kind: the mean over the measured layers.

    Full recomputation of a layer includes the last product of its attention, which that of a half-layer does not; its
    time is added to the attention's.
    """
    units: dict[Kind, list[Unit]] = defaultdict(list)
    for index, unit in enumerate(planned):
        cost = measured_unit(unit, samples_at(index, measured), static=static[index])
        strategies = cost.strategies
        if unit.type == "attention":
            both = measured[index, "layer"].median("recompute") - measured[index + 1, "full"].median("recompute")
            recompute = max(both, float(strategies["full"].recompute))
            cost = replace(cost, strategies={**strategies, "full": replace(strategies["full"], recompute=recompute)})
        elif unit.type == "mlp":
            additional = measured[index - 1, "layer"].saved_bytes - measured[index - 1, "full"].saved_bytes
            cost = replace(cost, strategies={**strategies, "full": replace(strategies["full"], after_full=additional)})
        units[kind_of(unit, config)].append(cost)
    return {kind: _mean(of_kind) for kind, of_kind in units.items()}


def samples_at(index: int, measured: Measurements) -> dict[str, UnitSamples]:
    """The samples of the unit at an index by strategy, including `split`."""
    return {strategy: samples for (i, strategy), samples in measured.items() if i == index and strategy != "layer"}


def measured_unit(planned: PlannedUnit, samples: Mapping[str, UnitSamples], *, static: float) -> Unit:
    """The costs of a unit from its samples.

    The backward for inputs is the full backward minus the backward for weights, so that their sum is the full backward,
    which most schedules run.
    """
    full, split = samples["none"], samples["split"]
    weight = split.median("weight")
    recomputing = {strategy: s for strategy, s in samples.items() if strategy not in ("none", "split")}
    return Unit(
        type=planned.type,
        layer=planned.layer,
        forward=full.median("forward"),
        backward_input=max(0.0, full.median("backward") - weight),
        backward_weight=weight,
        static=static,
        strategies={
            "none": Strategy(full.saved_bytes),
            **{strategy: Strategy(s.saved_bytes, s.median("recompute")) for strategy, s in recomputing.items()},
        },
        activation_after_input=split.bytes_after_input,
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
