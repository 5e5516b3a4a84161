"""The time of a plan's step when times are not as predicted: Monte Carlo over its program.

A draw disturbs three things.  *Jitter*: every operation that computes takes its time times a lognormal factor.
*Straggler*: one device, any with equal chance, computes slower for the whole step.  *Links*: messages, reductions and
copies of every device take longer, by a factor between 1 and the most.  All plans for a problem meet the same
disturbances: what is drawn depends on the seed, the draw, the device, the kind, the micro-batch and the chunk alone.

The order of operations stays as planned, that of transfers on links which devices share too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from debubble.ir import Lane, Number, Program, Robustness
from debubble.ir.arrays import Floats
from debubble.ir.ops import COMPUTE
from debubble.ir.program import LANE_CODE, STREAM
from debubble.search.problem import Objective
from debubble.simulator.engine import Graph

JITTER, STRAGGLER, LINKS = 0.05, 0.1, 1.0
"""Standard deviation of an operation's time; by how much the slow device is slower; by how much links are, at most:
all shares of the predicted time."""
DRAWS, LEAST, MAX_OPERATIONS = 64, 8, 2_000_000
"""Draws, at least, and instructions of all draws together from which there are fewer."""
TAIL = 0.95
"""The share of the draws that take no longer than what is called the worst."""

Cause = Literal["jitter", "straggler", "links"]
CAUSES: tuple[Cause, ...] = ("jitter", "straggler", "links")

_CHUNKS = 8
_LINKS = [LANE_CODE[lane] for lane in (Lane.SEND, Lane.RECV, Lane.D2H, Lane.H2D, Lane.REDUCE)]


def robustness(program: Program, *, objective: Objective, tail: Number = 0, seed: int = 0) -> Robustness:
    """Judge a lowered plan under disturbances: the step's mean and worst times, and the mean under each cause alone.

    `objective` is the pipeline's part of a step, `tail` the time that follows it, which is not disturbed.
    """
    disturbed = _Disturbed(program, objective)
    # Plans of one problem have the same number of draws, whatever they split, move or recompute.
    pairs = program.devices * program.schedule.micro_batches
    draws = max(LEAST, min(DRAWS, MAX_OPERATIONS // (8 * pairs)))
    times = np.array([disturbed.time(CAUSES, seed, draw) for draw in range(draws)])
    fewer, ending = range(max(LEAST, draws // 4)), float(tail)
    alone = {
        cause: float(np.mean([disturbed.time((cause,), seed, draw) for draw in fewer])) + ending for cause in CAUSES
    }
    worst = float(np.quantile(times, TAIL)) + ending
    return Robustness(draws=draws, expected=float(times.mean()) + ending, worst=worst, **alone)


class _Disturbed:
    """A program whose operations take other times than planned."""

    def __init__(self, program: Program, objective: Objective) -> None:
        self.program, self.objective = program, objective
        self.graph = Graph(program.predecessors, compiled=True)
        self.duration = np.asarray(program.duration, dtype=np.float64)
        self.lead = np.asarray(program.lead, dtype=np.float64)
        streams = program.waits.moment == STREAM
        self.streaming, self.streamed = program.waits.after[streams], program.waits.other[streams]
        """The instructions that wait for a part of another one, and those that they wait for."""
        chunk = np.zeros(program.schedule.stages, dtype=np.int64)
        for stages in program.schedule.placement.stages_of:
            chunk[list(stages)] = np.arange(len(stages)) % _CHUNKS
        self.chunk = chunk[np.maximum(program.stage, 0)]
        self.kind = np.minimum(program.kind, len(COMPUTE))
        self.micro_batch = np.maximum(program.micro_batch, 0)
        self.on_link = np.isin(program.lane, _LINKS)
        # Both ends of a message take as long.
        self.link = np.where(program.peer >= 0, np.minimum(program.device, program.peer), program.device)
        self.compute = program.lane == LANE_CODE[Lane.COMPUTE]

    def time(self, causes: Sequence[Cause], seed: int, draw: int) -> float:
        """The pipeline's part of the step in one draw, disturbed by these causes."""
        factor = self._factors(causes, np.random.default_rng([seed, draw]))
        # A lead is in proportion to both operations: it holds with the one that takes less longer.
        lead = self.lead.copy()
        lead[self.streaming] *= np.minimum(factor[self.streaming], factor[self.streamed])
        start, end, _ = self.graph.times(self.duration * factor, lead)
        if self.objective == "makespan":
            return float(end.max())
        device = self.program.device[self.compute]
        first, last = np.full(self.program.devices, np.inf), np.zeros(self.program.devices)
        np.minimum.at(first, device, start[self.compute])
        np.maximum.at(last, device, end[self.compute])
        return float((last - first).max())

    def _factors(self, causes: Sequence[Cause], chance: np.random.Generator) -> Floats:
        """The slowdown of each instruction; random draws do not depend on the causes."""
        program = self.program
        slow = chance.integers(program.devices)
        links = chance.uniform(1, 1 + LINKS, program.devices)
        sizes = program.devices, len(COMPUTE) + 1, _CHUNKS, program.schedule.micro_batches
        factor = np.ones(len(self.duration))
        if "jitter" in causes:
            # The mean of the factors is 1.
            jitter = chance.lognormal(-(JITTER**2) / 2, JITTER, sizes)
            drawn = jitter[program.device, self.kind, self.chunk, self.micro_batch]
            factor = np.where(self.on_link, factor, drawn)
        if "straggler" in causes:
            factor[self.compute & (program.device == slow)] *= 1 + STRAGGLER
        if "links" in causes:
            factor[self.on_link] *= links[self.link[self.on_link]]
        return factor
