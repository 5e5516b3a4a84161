"""Simulation of a Program whose devices are processes that share a machine's cores.

Every busy lane gets an equal share of the cores and never more than one: with k lanes busy on c cores each runs at
speed min(1, c / k).  A process copies what it offloads with a core, too; messages alone take the time they always take.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from debubble.ir import Lane, Number, Program
from debubble.ir.program import END, START, STREAM
from debubble.simulator.timeline import Timeline

MESSAGES = (Lane.SEND, Lane.RECV)


def run_shared(program: Program, *, cores: Number) -> Timeline:
    """Simulate a program whose devices share cores, so many lanes of which can run at full speed at a time.

    With as many cores as lanes the timeline is that of `run`.  Raises DeadlockError with the cycle if operations wait
    for each other.
    """
    return _Machine(program, cores).run()


@dataclass
class _Machine:
    program: Program
    cores: Number
    now: Number = 0
    virtual_time: Number = 0
    """CPU seconds that every lane that was busy throughout has received: the clock of processor sharing."""
    running: int = 0
    """Number of instructions that share the cores."""
    busy: list[tuple[Number, int, int]] = field(default_factory=list)
    """(Virtual time, moment, instruction) of the ends of what the cores share and of what streams with it, a heap."""
    others: list[tuple[Number, int]] = field(default_factory=list)
    """(End, instruction) of what runs next to the cores, a heap."""

    def run(self) -> Timeline:
        """Advance from event to event until nothing is running."""
        before = self.program.predecessors
        self.first, self.after, self.moment = (part.tolist() for part in before.reversed)
        self.lead = self.program.lead.tolist()
        self.missing: list[int] = np.diff(before.first).tolist()
        self.starts: list[Number] = [0] * len(self.missing)
        self.ends: list[Number] = [0] * len(self.missing)
        ended: list[int] = []
        self._start([index for index, count in enumerate(self.missing) if not count])
        while self.busy or self.others:
            moment, index = self._next()
            if moment == END:
                self.ends[index] = self.now
                ended.append(index)
            self._start(self._release(index, moment))
        if len(ended) < len(self.missing):
            raise self.program.deadlock(ended)
        return Timeline.of(self.program, self.starts, self.ends)

    def _next(self) -> tuple[int, int]:
        """Advance to the next end, or moment at which something may stream, and return it with its instruction."""
        speed = min(1, self.cores / self.running) if self.running else 0
        if not self.others or (
            self.busy and self.now + (self.busy[0][0] - self.virtual_time) / speed <= self.others[0][0]
        ):
            clock, moment, index = heapq.heappop(self.busy)
            self.now += (clock - self.virtual_time) / speed
            self.virtual_time = clock
            self.running -= moment == END
        else:
            at, index = heapq.heappop(self.others)
            self.virtual_time += (at - self.now) * speed
            self.now, moment = at, END
        return moment, index

    def _start(self, ready: list[int]) -> None:
        for index in ready:
            instruction = self.program.instructions[index]
            self.starts[index] = self.now
            if instruction.lane not in MESSAGES:
                end = self.virtual_time + instruction.duration
                heapq.heappush(self.busy, (end, END, index))
                self.running += 1
                for at in self._streams(index):
                    heapq.heappush(self.busy, (max(self.virtual_time, end - at), STREAM, index))
            else:
                heapq.heappush(self.others, (self.now + instruction.duration, index))
            ready.extend(self._release(index, START))

    def _streams(self, index: int) -> list[Number]:
        """The lead of what streams with an instruction, one at most: a forward's offload, or a reload's backward."""
        edges = range(self.first[index], self.first[index + 1])
        return [self.lead[self.after[edge]] for edge in edges if self.moment[edge] == STREAM]

    def _release(self, index: int, moment: int) -> list[int]:
        """Count a moment of an instruction as come, and return the instructions that nothing holds back any more."""
        released: list[int] = []
        for edge in range(self.first[index], self.first[index + 1]):
            if self.moment[edge] == moment:
                after = self.after[edge]
                self.missing[after] -= 1
                if not self.missing[after]:
                    released.append(after)
        return released
