"""The plan file: a plan's content as JSON, with a version.

Orders are written in torch's letters, one string per device, so that a person can read and edit them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any

import msgspec

from debubble.files import decode_json
from debubble.ir.degrees import DegreeSearch
from debubble.ir.ops import Op
from debubble.ir.placement import Placement
from debubble.ir.plan_entries import CandidateSummary, Origin, PlannedUnit, RunOptions, WhatIf
from debubble.ir.schedule import Schedule, Shares
from debubble.ir.schedule_checks import check
from debubble.registry import unknown_name

VERSION = 1


class ScheduleFile(msgspec.Struct, forbid_unknown_fields=True):
    """The schedule in a plan file; orders are operation names separated by blanks."""

    name: str
    placement: list[int]
    micro_batches: int
    orders: list[str]
    fused_recompute: list[int] = []
    recompute_fraction: dict[int, float | list[float]] = {}
    offload_fraction: dict[int, float | list[float]] = {}
    deeper: list[tuple[int, int]] = []
    peers: dict[int, int] = {}
    asynchronous: list[int] = []
    slices: int | msgspec.UnsetType = msgspec.UNSET
    """Slices of every sequence; absent: sequences are whole."""
    link_orders: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The transfers of shared links, as orders; absent: all are served by arrival."""

    @staticmethod
    def from_schedule(schedule: Schedule) -> ScheduleFile:
        """The entries of a schedule."""
        s = schedule
        return ScheduleFile(
            name=s.name,
            placement=list(s.placement.device_of),
            micro_batches=s.micro_batches,
            orders=_names(s.orders),
            fused_recompute=sorted(s.fused_recompute),
            recompute_fraction=_written(s.recompute_fraction),
            offload_fraction=_written(s.offload_fraction),
            deeper=sorted(s.deeper),
            peers=dict(s.peers),
            asynchronous=sorted(s.asynchronous),
            slices=s.slices if s.slices > 1 else msgspec.UNSET,
            link_orders=_names(s.link_orders) if s.link_orders else msgspec.UNSET,
        )

    def schedule(self) -> Schedule:
        """The schedule that they describe.  Raises InputError or ScheduleError if they contradict each other."""
        schedule = Schedule(
            name=self.name,
            placement=Placement.of(self.placement),
            micro_batches=self.micro_batches,
            orders=_parsed(self.orders),
            fused_recompute=frozenset(self.fused_recompute),
            recompute_fraction=_read(self.recompute_fraction),
            offload_fraction=_read(self.offload_fraction),
            deeper=frozenset(self.deeper),
            peers=self.peers,
            asynchronous=frozenset(self.asynchronous),
            slices=1 if self.slices is msgspec.UNSET else self.slices,
            link_orders=() if self.link_orders is msgspec.UNSET else _parsed(self.link_orders),
        )
        check(schedule)
        return schedule


def _names(orders: Iterable[Iterable[Op]]) -> list[str]:
    return [" ".join(op.name for op in order) for order in orders]


def _parsed(orders: Iterable[str]) -> tuple[tuple[Op, ...], ...]:
    return tuple(tuple(Op.parse(name) for name in order.split()) for order in orders)


def _written(shares: Shares) -> dict[int, float | list[float]]:
    """Shares as a plan file has them: a list where micro-batches differ."""
    return {s: [*map(float, share)] if isinstance(share, tuple) else float(share) for s, share in shares.items()}


def _read(shares: Mapping[int, float | list[float]]) -> Shares:
    return {stage: tuple(share) if isinstance(share, list) else share for stage, share in shares.items()}


class PlanFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A plan file, field by field."""

    debubble_plan: int
    planner: str
    schedule: ScheduleFile
    costs: dict[str, Any]
    partition: tuple[tuple[PlannedUnit, ...], ...]
    lower_bound: Annotated[float, msgspec.Meta(ge=0)]
    bound_argument: str | None = None
    solve_seconds: float = 0.0
    candidates: tuple[CandidateSummary, ...] = ()
    model: dict[str, Any] | None = None
    model_name: str | None = None
    cluster: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    options: RunOptions = msgspec.field(default_factory=RunOptions)
    degree_search: DegreeSearch | None = None
    what_ifs: tuple[WhatIf, ...] = ()
    other_targets: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    origin: Origin | None = None
    measured: bool = False
    target: str | None = None


class _Options(msgspec.Struct):
    options: dict[str, Any] = {}


def check_option_names(content: bytes) -> None:
    """Raise InputError for an option of a plan file's run that there is not, which its decoder passes over."""
    names = [field.name for field in fields(RunOptions)]
    for name in decode_json(content, _Options).options:
        if name not in names:
            raise unknown_name(name, names, kind="option of a run")
