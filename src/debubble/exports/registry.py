"""The exporters' registry: each turns a plan into another framework's files, decorated with `@exporter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from debubble.argument_types import with_checked_types
from debubble.errors import readable
from debubble.exports.layers import ENDS, require_layers
from debubble.exports.options import OptionTable, settings_of
from debubble.exports.prices import (
    as_one_stage,
    changes_step,
    fits,
    module_offload,
    slowdown,
    tells_slowdown,
    to_whole_layers,
    with_options,
)
from debubble.exports.reduction import compute_only, with_kept_ends
from debubble.files import write_whole
from debubble.ir import ExportError
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.registry import FRAMEWORKS, Registry
from debubble.targets import Target, targets


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files for another framework, and what of the plan is not in them."""

    files: Mapping[str, str]
    """Name -> content."""
    losses: tuple[str, ...] = ()
    """One sentence for each thing that the target cannot express; a plan that fits still does."""
    own_kernels: str | None = None
    """A sentence on the plan's step with the target's own kernels, where the plan prices none and they change it."""

    @with_checked_types()
    def write(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files, each whole or not at all; files of these names are replaced.

        Args:
            folder: Where to; it is made if it is not there.

        Returns:
            The files' paths.

        Raises:
            InputError: If they cannot be written.
        """
        paths = tuple(Path(folder) / name for name in self.files)
        for path, content in zip(paths, self.files.values(), strict=True):
            write_whole(path, content.encode())
        return paths


Exporter = Callable[[Plan], Export]
"""Raises ExportError if the target cannot keep what the plan depends on."""


@dataclass(frozen=True)
class ExportDraft:
    """An exporter's files for a plan that holds nothing but what its target knows."""

    files: Mapping[str, str]
    runs: Plan
    """The plan as the target runs it, from which the whole slowdown is predicted."""
    losses: tuple[str, ...] = ()


exports: Registry[Exporter] = Registry("debubble.exports", folders=(FRAMEWORKS, "export"), kind="export target")


def exporter(
    name: str, *, options: OptionTable, layers: bool = True
) -> Callable[[Callable[[Plan, Mapping[str, Any]], ExportDraft]], Exporter]:
    """Register the exporter of a target.

    Args:
        name: The target's name; what it refuses never reaches the exporter.
        options: For every run option, what becomes of it; the exporter is given the settings.
        layers: Whether it partitions by layers; it is then given plans of whole layers, and others are refused.
    """

    def register(make: Callable[[Plan, Mapping[str, Any]], ExportDraft]) -> Exporter:
        @with_checked_types()
        def export(plan: Plan, /) -> Export:
            target = targets[name]
            if layers:
                require_layers(plan, target=target.title)
            _check(target, plan)
            plan, too_large = _without_limit(plan)
            plan, joined = as_one_stage(plan) if target.levers is not None else (plan, ())
            offloads = plan.schedule.offloaded and module_offload(plan, target) is not None
            reduced, losses = compute_only(plan, target=target, offloads=bool(offloads))
            settings, lost = settings_of(reduced, options)
            reduced, of_ends = with_kept_ends(reduced, target=target.title) if layers else (reduced, ())
            reduced, of_layers = to_whole_layers(reduced)
            made = make(reduced, settings)
            said = (*too_large, *joined, *lost, *_unit_losses(plan), *losses, *of_ends, *of_layers, *made.losses)
            total = _total_slowdown(plan, made.runs, said)
            return Export(files=made.files, losses=(*said, *total), own_kernels=_own_kernels(target, made.runs))

        exports.add(name, export)
        return export

    return register


def _without_limit(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """An imported job that is predicted not to fit, without its limit: it runs, whatever is predicted."""
    if plan.planner != "imported" or fits(plan):
        return plan, ()
    unlimited = replace(plan, costs=plan.costs.with_limit(None))
    return unlimited, (f"The imported job is predicted not to fit: its fullest device needs {_peak(unlimited)}.",)


def _peak(plan: Plan) -> str:
    """The bytes of the fullest device of a plan without a limit, in words."""
    return readable(float(max(plan.simulate().peak_memory)))


def _check(target: Target, plan: Plan) -> None:
    """Raise ExportError for run options that the target refuses."""
    if plan.model is None:
        return
    why = target.refusal(plan.options, plan.model, pipeline=plan.devices)
    if why is not None:
        raise ExportError(why)


def _own_kernels(target: Target, runs: Plan) -> str | None:
    """Say how the target's own kernels change the step of a plan that prices no framework's; None: they do not."""
    if runs.model is None or runs.profile is not None or runs.options.framework or not target.framework:
        return None
    repriced = with_options(runs, replace(runs.options, framework=target.framework))
    if repriced is None:
        return None
    beginning = f"The plan prices no framework's kernels; with those of {target.framework}"
    if not fits(repriced):
        peak = _peak(replace(repriced, costs=repriced.costs.with_limit(None)))
        return f"{beginning} its fullest device needs {peak} and does not fit: plan again with --for {target.name}."
    if not changes_step(repriced, runs):
        return None
    return f"{beginning} {slowdown(repriced, runs)}: --for {target.name} plans with them."


def _unit_losses(plan: Plan) -> tuple[str, ...]:
    """Sentences on units and micro-batches that are unlike each other, which no target expresses."""
    types = {unit.type: None for units in plan.partition for unit in units}
    unknown = [name for name in types if name not in (*ENDS, "attention", "mlp", "layer", "stage")]
    losses = []
    if unknown:
        losses.append(f"Each unit of type {' or '.join(unknown)} is taken for one decoder layer.")
    if plan.has_lengths:
        losses.append("The plan counts on the lengths of its micro-batches: give the target batches of these lengths.")
    return tuple(losses)


def _total_slowdown(plan: Plan, runs: Plan, losses: Sequence[str]) -> tuple[str, ...]:
    """The slowdown of all that was changed, where more than one sentence has one."""
    if sum(map(tells_slowdown, losses)) < 2:
        return ()
    waiting = replace(runs, options=replace(runs.options, post_validation=False))
    ratio = seconds_per_step(waiting) / seconds_per_step(plan)
    return (f"With all of this the step is predicted to take {ratio:.3f} times as long as planned.",)
