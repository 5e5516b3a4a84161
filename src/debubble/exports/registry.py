"""The exporters' registry: each turns a plan into another framework's files, decorated with `@exporter`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from debubble.exports.whole_layers import to_whole_layers
from debubble.ir import Plan
from debubble.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files for another framework, and what of the plan is not in them."""

    files: Mapping[str, str]
    """Name -> content."""
    losses: tuple[str, ...] = ()
    """What the target cannot express, one sentence each; the plan still fits in memory."""


class Exporter(Protocol):
    """Raises ExportError if the target cannot keep what the plan depends on."""

    def __call__(self, plan: Plan, /) -> Export: ...


exports: Registry[Exporter] = Registry("debubble.exports", what="export target")


def _adapters(plan: Plan) -> tuple[str, ...]:
    if not plan.options.lora:
        return ()
    return (
        f"LoRA of rank {plan.options.lora}: configure adapters of that rank in the target; whole parameters take more"
        " memory than the plan counts on.",
    )


def exporter(name: str) -> Callable[[Exporter], Exporter]:
    """Register an exporter under its target's name; it is given plans of whole layers, if possible."""

    def register(export: Exporter) -> Exporter:
        def with_whole_layers(plan: Plan, /) -> Export:
            whole, losses = to_whole_layers(plan)
            made = export(whole)
            return replace(made, losses=(*_adapters(plan), *losses, *made.losses))

        exports.add(name, with_whole_layers)
        return export

    return register
