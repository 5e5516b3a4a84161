"""Robustness: a plan's step when times differ from the prediction, by Monte Carlo simulation of its program.

A draw has three disturbances.  *Jitter*: the time of every compute operation is multiplied by a lognormal factor.
*Straggler*: one device, drawn uniformly, computes slower during the full step.  *Links*: messages, reductions and
copies of a device take longer, by a uniform factor.  All plans for a problem have the same disturbances, which only
depend on the seed, the draw, the device, the kind, the micro-batch and the chunk.

The order of operations stays as planned, also that of transfers on shared links.
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
"""Standard deviation of an operation's time, slowdown of the straggler, and largest slowdown of links, as fractions of
the predicted time."""
MAX_DRAWS, MIN_DRAWS, MAX_OPERATIONS = 64, 8, 2_000_000
"""Limits of the number of draws, and approximate maximum number of instructions of all draws together."""
WORST_QUANTILE = 0.95
"""The quantile of the draws that is reported as the worst step."""

Cause = Literal["jitter", "straggler", "links"]
CAUSES: tuple[Cause, ...] = ("jitter", "straggler", "links")

_CHUNKS = 8
_LINKS = [LANE_CODE[lane] for lane in (Lane.SEND, Lane.RECV, Lane.D2H, Lane.H2D, Lane.REDUCE)]


def robustness(program: Program, *, objective: Objective, tail: Number = 0, seed: int = 0) -> Robustness:
    """The mean and worst step of a lowered plan under disturbances, and the mean under every single cause.

    `objective` is the objective of the pipeline's time; `tail` is the time after the pipeline, which is not disturbed.
    """
    disturbed = _Disturbed(program, objective)
    # The number of draws only depends on the problem, not on the plan.
    pairs = program.devices * program.schedule.micro_batches
    draws = max(MIN_DRAWS, min(MAX_DRAWS, MAX_OPERATIONS // (8 * pairs)))
    times = np.array([disturbed.time(CAUSES, seed, draw) for draw in range(draws)])
    few, ending = range(max(MIN_DRAWS, draws // 4)), float(tail)
    alone = {cause: float(np.mean([disturbed.time((cause,), seed, draw) for draw in few])) + ending for cause in CAUSES}
    worst = float(np.quantile(times, WORST_QUANTILE)) + ending
    return Robustness(draws=draws, expected=float(times.mean()) + ending, worst=worst, **alone)


class _Disturbed:
    """A program with disturbed times of operations."""

    def __init__(self, program: Program, objective: Objective) -> None:
        self.program, self.objective = program, objective
        self.graph = Graph(program.predecessors, compiled=True)
        self.duration = np.asarray(program.duration, dtype=np.float64)
        self.lead = np.asarray(program.lead, dtype=np.float64)
        streams = program.waits.moment == STREAM
        self.stream_readers, self.stream_sources = program.waits.after[streams], program.waits.other[streams]
        """The instructions that wait for a fraction of another one, and those that they wait for."""
        chunk = np.zeros(program.schedule.stages, dtype=np.int64)
        for stages in program.schedule.placement.stages_of:
            chunk[list(stages)] = np.arange(len(stages)) % _CHUNKS
        self.chunk = chunk[np.maximum(program.stage, 0)]
        self.kind = np.minimum(program.kind, len(COMPUTE))
        self.micro_batch = np.maximum(program.micro_batch, 0)
        self.on_link = np.isin(program.lane, _LINKS)
        # Both ends of a message have the same factor.
        self.link = np.where(program.peer >= 0, np.minimum(program.device, program.peer), program.device)
        self.compute = program.lane == LANE_CODE[Lane.COMPUTE]

    def time(self, causes: Sequence[Cause], seed: int, draw: int) -> float:
        """The pipeline's time in one draw with these causes."""
        factor = self._factors(causes, np.random.default_rng([seed, draw]))
        # A lead scales with the operation that is slowed down less.
        lead = self.lead.copy()
        lead[self.stream_readers] *= np.minimum(factor[self.stream_readers], factor[self.stream_sources])
        start, end, _ = self.graph.times(self.duration * factor, lead)
        if self.objective == "makespan":
            return float(end.max())
        device = self.program.device[self.compute]
        first, last = np.full(self.program.devices, np.inf), np.zeros(self.program.devices)
        np.minimum.at(first, device, start[self.compute])
        np.maximum.at(last, device, end[self.compute])
        return float((last - first).max())

    def _factors(self, causes: Sequence[Cause], chance: np.random.Generator) -> Floats:
        """Per instruction, its factor; random numbers do not depend on the causes."""
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
