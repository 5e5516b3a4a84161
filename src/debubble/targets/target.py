"""The targets' registry: what each framework can run of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from debubble.costs import hardware
from debubble.costs.partition import partition_named
from debubble.costs.units import Units
from debubble.ir import InputError, PlannedUnit, RunOptions, Schedule
from debubble.ir.ops import Kind
from debubble.models import Model
from debubble.registry import FRAMEWORKS, Registry
from debubble.targets.levers import TargetLevers
from debubble.targets.orders import OwnOrders, undivided, without_transfers

Rule = Callable[[str, RunOptions, Model], str | None]
"""A sentence that says why the framework of that title refuses a run with these options of that model; None: this rule
does not refuse it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A framework for which debubble plans.

    Attributes:
        name: What `--for` and `--to` call it.
        title: Its name in sentences.
        framework: The framework that is priced for it (see `costs.frameworks`); empty: what is priced without a name.
        ascend: Whether it runs on Ascend devices alone, of which none is known by name.
        zero: ZeRO levels that it has over a pipeline.
        zero_alone: ZeRO levels that it has without one; level 0 is every target's on a single rank.
        rules: What of a run it refuses, next to a higher ZeRO level.
        levers: What a plan may choose; None: everything.
        overlapping: What it may choose where tokens travel to experts next to computing (`expert_overlap`); None: the
            same.
        for_pipelines: Rules that hold for pipelines of several devices alone.
        untested: Rules for such pipelines that refuse nothing: their sentences say what its project does not test.
        offload_release: The release that its offload of activations needs; empty: any has it, or none.
    """

    name: str
    title: str
    framework: str = ""
    ascend: bool = False
    zero: tuple[int, ...] = (0, 1)
    zero_alone: tuple[int, ...] = (0, 1)
    rules: Sequence[Rule] = ()
    for_pipelines: Sequence[Rule] = ()
    untested: Sequence[Rule] = ()
    levers: TargetLevers | None = None
    overlapping: TargetLevers | None = None
    offload_release: str = ""

    def runs_on(self, device: str) -> bool:
        """Tell whether it may run on a device of that name."""
        return not self.ascend or device not in hardware

    def priced(self, options: RunOptions) -> RunOptions:
        """The options of a run, whose framework is the target's where they name none."""
        return replace(options, framework=options.framework or self.framework)

    def levers_of(self, options: RunOptions, *, pipeline: int) -> TargetLevers | None:
        """The levers of a plan with these options on so many pipeline devices; None: all.

        Without a pipeline a framework accumulates gradients, a micro-batch after the other through the whole model.
        """
        levers = self.overlapping if options.expert_overlap and self.overlapping is not None else self.levers
        return levers if levers is None or pipeline > 1 else replace(levers, orders=OwnOrders(("1f1b",)))

    def zero_levels(self, pipeline: int) -> tuple[int, ...]:
        """The ZeRO levels that it has over so many pipeline devices."""
        return self.zero if pipeline > 1 else self.zero_alone

    def nearest_zero(self, level: int, *, pipeline: int) -> int:
        """The lowest of its ZeRO levels that is at least this one; its highest if there is none."""
        levels = self.zero_levels(pipeline)
        return min((zero for zero in levels if zero >= level), default=max(levels))

    def refusal(self, options: RunOptions, model: Model, *, pipeline: int) -> str | None:
        """Say why it runs no plan with these options, whatever its ZeRO level; None if it does."""
        rules = (*self.rules, *(self.for_pipelines if pipeline > 1 else ()))
        return next((why for rule in rules if (why := rule(self.title, options, model)) is not None), None)

    def untested_parts(self, options: RunOptions, model: Model, *, pipeline: int) -> tuple[str, ...]:
        """Sentences on what of a run with these options its project does not test."""
        rules = self.untested if pipeline > 1 else ()
        return tuple(why for rule in rules if (why := rule(self.title, options, model)) is not None)

    def check(self, options: RunOptions, model: Model, *, pipeline: int) -> None:
        """Raise InputError if it runs no plan with these options."""
        why = self.refusal(options, model, pipeline=pipeline)
        if why is None and options.zero not in self.zero_levels(pipeline):
            nearest = self.nearest_zero(options.zero, pipeline=pipeline)
            where = "over" if pipeline > 1 else "without"
            why = (
                f"{self.title} does not divide model states as ZeRO-{options.zero} {where} a pipeline; plan again with"
                f" --zero {nearest}."
            )
        if why is None and options.post_validation and self.levers is not None:
            why = f"{self.title} waits for the norm of all gradients; plan again without --post-validation."
        if why is not None:
            raise InputError(why)

    def runs(
        self,
        schedule: Schedule,
        stages: Sequence[Sequence[PlannedUnit]],
        options: RunOptions,
        model: Model,
        *,
        units: Units | None = None,
    ) -> bool:
        """Tell whether it runs a plan as it is, nothing changed; `units` are the half-layers of one that offloads."""
        pipeline = schedule.devices
        levers = self.levers_of(options, pipeline=pipeline)
        if (
            options.zero not in self.zero_levels(pipeline)
            or self.refusal(options, model, pipeline=pipeline) is not None
        ):
            return False
        if levers is None:
            return True
        if options.post_validation:
            return False
        if schedule.offloaded and units is not None and levers.offload:
            halves = levers.half_layers(units, model, options)
            if levers.offload_of(schedule, halves, partition_named(stages, halves)) is not None:
                schedule = without_transfers(schedule)
        plain = without_transfers(schedule)
        if pipeline == 1 and plain.orders == schedule.orders:
            schedule = plain = undivided(plain)
            stages = [[unit for stage in stages for unit in stage]] if plain.stages == 1 else stages
        fused = frozenset(s for s, stage in enumerate(stages) if any(unit.strategy != "none" for unit in stage))
        if plain.orders != schedule.orders or any(op.kind is Kind.R for op in schedule.operations):
            return False
        if levers.orders.as_run(schedule, fused).orders != schedule.orders:
            return False
        return levers.expresses(stages, sparse_layers(model)) and levers.orders.refusal(schedule) is None


targets: Registry[Target] = Registry(
    "debubble.targets",
    folders=(FRAMEWORKS, "target"),
    kind="framework",
    order=("debubble", "torch", "torchtitan", "automodel", "megatron", "primus", "deepspeed", "mindformers"),
)


def sparse_layers(model: Model) -> frozenset[int]:
    """The layers with experts."""
    return frozenset(layer for layer in range(model.layers) if model.is_moe(layer))


def runs_in(
    schedule: Schedule,
    stages: Sequence[Sequence[PlannedUnit]],
    options: RunOptions,
    model: Model,
    *,
    units: Units | None = None,
) -> tuple[str, ...]:
    """Names of the targets that run a model's plan as it is; `units` are the half-layers of one that offloads.

    A model of a family that debubble does not know is promised to none.
    """
    if not model.known:
        return ()
    return tuple(name for name, target in targets.items() if target.runs(schedule, stages, options, model, units=units))
