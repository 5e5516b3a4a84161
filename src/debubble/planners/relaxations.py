"""A relaxation that every plan satisfies: memory is short in the ramps, before the first backward and at the end.

The first backward cannot begin before one micro-batch went forward through all units, at t0; after the last
forward a micro-batch goes back through all units, which takes t1.  So in the first t0 devices only do forwards, in the
last t1 only backwards, and what these windows cannot fill is idle time:

    devices x T >= work + recomputation + (idle time in the first t0) + (idle time in the last t1).

Forwards of the first window leave activations that are in memory at t0, or went to the host by then; inputs' gradients
of the last window need activations that were in memory at T - t1, or come from the host after it; and weight gradients
alone need what remains of them.  How much recomputation is worth its time there is a linear program.  It gives up
the order of operations, who holds which unit, and all but the sums of memory and of links.

Where optimizer states may be the host's, memory is free of them, but then the host steps behind the last weight
gradient.  If the hosts step s seconds on average, one of them begins s seconds before the end at the latest, when all
micro-batches have been forward and back to some unit: no forward runs in the last s seconds either, and the last window
is that long.  The bound is the least over ranges of s, of which each counts as freed all that it may free.

docs/joint.md has the proofs at length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.costs import Units
from debubble.costs.units import Unit
from debubble.ir import StageCosts

RANGES = 32
"""Ranges of the time that hosts step."""
ROUNDING = 1e-9
"""Share by which a linear program's optimum is taken down, so that its rounding raises no bound."""


@dataclass(frozen=True)
class Piece:
    """A piece of work that devices cannot divide: a unit, or a given stage.

    Attributes:
        forward: Time of F.
        backward_input: Time of I.
        backward_weight: Time of W.
        static: Bytes of its states where they are on the device.
        hosted: Bytes of them that stay there if the host steps; as many as `static` if it cannot.
        host_step: Time of a step on the host.
        after_input: Bytes that remain between I and W.
        strategies: Bytes that F keeps, and the time to bring the rest back.
    """

    forward: float
    backward_input: float
    backward_weight: float
    static: float
    hosted: float
    host_step: float
    after_input: float
    strategies: tuple[tuple[float, float], ...]

    @property
    def work(self) -> float:
        """Time of F, I and W."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Pieces:
    """Pieces in model order, the devices that they are dealt to, and their micro-batches.

    Attributes:
        pieces: The pieces.
        rooms: Per device, bytes for states and activations.
        micro_batches: Micro-batches, counted by their length.
        communication: Least time of a message.
        bytes_per_second: What all links to hosts carry together in one direction.
        workspace: Least bytes that all devices together hold beside states and activations, for the units at work.
    """

    pieces: tuple[Piece, ...]
    rooms: tuple[float, ...]
    micro_batches: float
    communication: float
    bytes_per_second: float
    workspace: float = 0.0


def pieces_of_units(units: Units, *, rooms: Sequence[float], micro_batches: float) -> Pieces:
    """The units of a model, as they may be dealt to devices."""
    return Pieces(
        pieces=tuple(_piece(unit, hostable=units.hostable) for unit in units.units),
        rooms=tuple(rooms),
        micro_batches=micro_batches,
        communication=float(units.communication),
        bytes_per_second=_links(len(rooms), units.link_groups)
        * float(units.offload_bandwidth or units.module_bandwidth or 0),
        workspace=_workspace(units, len(rooms)),
    )


def _workspace(units: Units, devices: int) -> float:
    """The least sum over devices of the largest workspace among their units.

    One device has the unit with the largest; of the others, the k with the least hold at least k units within it.
    """
    each = sorted(
        min(float(unit.workspace) for unit in kinds) for kinds in zip(units.units, *units.on_devices, strict=True)
    )
    return sum(each[: devices - 1]) + each[-1]


def _piece(unit: Unit, *, hostable: bool) -> Piece:
    strategies = {
        (float(min(s.activation, s.activation if s.after_full is None else s.after_full)), float(s.recompute))
        for s in unit.strategies.values()
    }
    host = unit.on_host if hostable else None
    after = unit.activation / 2 if unit.activation_after_input is None else unit.activation_after_input
    return Piece(
        forward=float(unit.forward),
        backward_input=float(unit.backward_input),
        backward_weight=float(unit.backward_weight),
        static=float(unit.static),
        hosted=float(unit.static if host is None else min(host.static, unit.static)),
        host_step=0.0 if host is None else float(host.step),
        after_input=float(after),
        strategies=tuple(sorted(strategies)),
    )


def pieces_of_stages(costs: StageCosts, *, rooms: Sequence[float], micro_batches: float) -> Pieces:
    """Stages that are given, as they may be dealt to devices; their states are in the devices' rooms."""
    transfers = costs.transfers
    pace = 0.0
    if transfers is not None:
        each = zip(costs.activation, transfers.offload, transfers.reload, strict=True)
        pace = max((float(a) / float(t) if t else math.inf for a, *times in each for t in times if a), default=0.0)
    return Pieces(
        pieces=tuple(
            Piece(
                forward=float(costs.forward[s]),
                backward_input=float(costs.backward_input[s]),
                backward_weight=float(costs.backward_weight[s]),
                static=0.0,
                hosted=0.0,
                host_step=0.0,
                after_input=float(costs.activation_after_input[s]),
                strategies=(
                    (float(costs.activation[s]), 0.0),
                    (float(costs.activation_recomputed[s]), float(costs.recompute[s])),
                ),
            )
            for s in range(costs.stages)
        ),
        rooms=tuple(rooms),
        micro_batches=micro_batches,
        communication=float(min(costs.communication, default=0)),
        bytes_per_second=_links(len(rooms), costs.link_groups) * pace if pace else 0.0,
    )


def _links(devices: int, groups: Sequence[Sequence[int]]) -> int:
    """Links to the host: one per group, and one per device that is in none."""
    return devices - sum(map(len, groups)) + len(groups)


def first_arrivals(a: Pieces) -> NDArray[np.float64]:
    """Earliest times of the devices' first forwards, in order: one micro-batch comes to them one after the other.

    Device k in this order holds none of the first k pieces alone, and k messages were sent before.
    """
    number = np.arange(len(a.rooms))
    before = np.cumsum([0.0, *(piece.forward for piece in a.pieces)])
    arrivals: NDArray[np.float64] = before[number] + a.communication * number
    return arrivals


def ramps_bound(a: Pieces) -> float:
    """The least makespan that work, memory and links leave, counting the idle time of both ramps; 0 without a limit."""
    room = sum(a.rooms) - a.workspace
    if math.isinf(room) or math.isinf(a.bytes_per_second):
        return 0.0
    stepped = sum(piece.host_step for piece in a.pieces)
    saved = sum(piece.static - piece.hosted for piece in a.pieces)
    needed = sum(piece.static for piece in a.pieces)
    if not saved or not stepped:
        return _with_states(a, free=room - needed + saved, window=0.0)
    ratio = max((p.static - p.hosted) / p.host_step for p in a.pieces if p.host_step)
    bounds = []
    for part in range(RANGES):
        least, most = stepped * part / RANGES, stepped * (part + 1) / RANGES
        free = room - needed + min(saved, most * ratio)
        bounds.append(_with_states(a, free=free, window=least / len(a.rooms)))
    return min(bounds)


def _with_states(a: Pieces, *, free: float, window: float) -> float:
    """The bound with so many bytes for activations on all devices, where no forward runs in a last window."""
    if free < 0:
        return math.inf
    from ortools.linear_solver import pywraplp

    devices, m = len(a.rooms), a.micro_batches
    crossings = (devices - 1) * a.communication
    first = sum(p.forward for p in a.pieces) + crossings
    last = max(sum(p.backward_input for p in a.pieces) + a.pieces[0].backward_weight + crossings, window)
    heads = first_arrivals(a).sum()
    kinds: Mapping[Piece, int] = Counter(a.pieces)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    in_first, in_last = (
        solver.Constraint(-math.inf, free + a.bytes_per_second * first),
        solver.Constraint(-math.inf, free + a.bytes_per_second * last),
    )
    forwards, backwards = (
        solver.Constraint(-math.inf, devices * first - heads),
        solver.Constraint(-math.inf, devices * last),
    )
    objective = solver.Objective()
    objective.SetMinimization()
    for piece, count in kinds.items():
        all_of_it = solver.Constraint(count * m, count * m)
        together = solver.Constraint(-math.inf, count * m)
        waiting = solver.NumVar(0, count * m, "")
        together.SetCoefficient(waiting, 1)
        in_last.SetCoefficient(waiting, piece.after_input)
        backwards.SetCoefficient(waiting, piece.backward_weight)
        objective.SetCoefficient(waiting, -piece.backward_weight)
        for kept, again in piece.strategies:
            number, early, late = (solver.NumVar(0, count * m, "") for _ in range(3))
            all_of_it.SetCoefficient(number, 1)
            objective.SetCoefficient(number, again)
            for part in (early, late):
                of_these = solver.Constraint(-math.inf, 0)
                of_these.SetCoefficient(part, 1)
                of_these.SetCoefficient(number, -1)
            in_first.SetCoefficient(early, kept)
            forwards.SetCoefficient(early, piece.forward)
            objective.SetCoefficient(early, -piece.forward)
            in_last.SetCoefficient(late, kept)
            together.SetCoefficient(late, 1)
            back = piece.backward_input + piece.backward_weight + again
            backwards.SetCoefficient(late, back)
            objective.SetCoefficient(late, -back)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return 0.0
    work = m * sum(p.work for p in a.pieces)
    total = work + devices * (first + last) + objective.Value()
    return float(total) / devices * (1 - ROUNDING)
