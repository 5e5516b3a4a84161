"""Simulation of a Program whose devices are processes that share a machine's cores.

Every busy lane gets an equal share of the cores, at most one core: with k busy lanes on c cores each runs at speed
min(1, c / k).  Copies of offloads and reloads use a core too; only messages take a fixed time.
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
    """Simulate a program whose devices share `cores` cores, the number of lanes that can run at full speed.

    With as many cores as lanes the timeline is that of `run`.  Raises DeadlockError with the cycle if operations wait
    for each other.
    """
    return _SharedCores(program, cores).run()


@dataclass
class _SharedCores:
    program: Program
    cores: Number
    now: Number = 0
    virtual_time: Number = 0
    """CPU time that a lane busy since time 0 has received: the clock of processor sharing."""
    running: int = 0
    """Number of instructions that share the cores."""
    core_events: list[tuple[Number, int, int]] = field(default_factory=list)
    """Heap of (virtual time, moment, instruction): ends, and moments for streaming, of instructions on the cores."""
    message_ends: list[tuple[Number, int]] = field(default_factory=list)
    """Heap of (end, instruction) of messages, which need no core."""

    def run(self) -> Timeline:
        """Advance from event to event until nothing is running."""
        before = self.program.predecessors
        self.first, self.after, self.moment = (column.tolist() for column in before.reversed)
        self.lead = self.program.lead.tolist()
        self.missing: list[int] = np.diff(before.first).tolist()
        self.starts: list[Number] = [0] * len(self.missing)
        self.ends: list[Number] = [0] * len(self.missing)
        ended: list[int] = []
        self._start([index for index, count in enumerate(self.missing) if not count])
        while self.core_events or self.message_ends:
            moment, index = self._next()
            if moment == END:
                self.ends[index] = self.now
                ended.append(index)
            self._start(self._release(index, moment))
        if len(ended) < len(self.missing):
            raise self.program.deadlock(ended)
        return Timeline.of(self.program, self.starts, self.ends)

    def _next(self) -> tuple[int, int]:
        """Advance to the next end or streaming moment, and return it with its instruction."""
        speed = min(1, self.cores / self.running) if self.running else 0
        until = (self.core_events[0][0] - self.virtual_time) / speed if self.core_events else None
        if not self.message_ends or (until is not None and self.now + until <= self.message_ends[0][0]):
            clock, moment, index = heapq.heappop(self.core_events)
            self.now += (clock - self.virtual_time) / speed
            self.virtual_time = clock
            self.running -= moment == END
        else:
            end_time, index = heapq.heappop(self.message_ends)
            self.virtual_time += (end_time - self.now) * speed
            self.now, moment = end_time, END
        return moment, index

    def _start(self, ready: list[int]) -> None:
        for index in ready:
            instruction = self.program.instructions[index]
            self.starts[index] = self.now
            if instruction.lane not in MESSAGES:
                end = self.virtual_time + instruction.duration
                heapq.heappush(self.core_events, (end, END, index))
                self.running += 1
                for lead in self._streams(index):
                    heapq.heappush(self.core_events, (max(self.virtual_time, end - lead), STREAM, index))
            else:
                heapq.heappush(self.message_ends, (self.now + instruction.duration, index))
            ready.extend(self._release(index, START))

    def _streams(self, index: int) -> list[Number]:
        """The leads of operations that stream with an instruction: a forward's offload, or a reload's backward."""
        edges = range(self.first[index], self.first[index + 1])
        return [self.lead[self.after[edge]] for edge in edges if self.moment[edge] == STREAM]

    def _release(self, index: int, moment: int) -> list[int]:
        """Process a moment of an instruction, and return the instructions that become ready."""
        released: list[int] = []
        for edge in range(self.first[index], self.first[index + 1]):
            if self.moment[edge] == moment:
                after = self.after[edge]
                self.missing[after] -= 1
                if not self.missing[after]:
                    released.append(after)
        return released
