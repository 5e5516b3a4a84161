"""In which stages the runs of a model may end: choices that hold every assignment which keeps the order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from debubble.papers.scope.program.instance import Instance
from debubble.papers.scope.program.subproblem import Open


@dataclass(frozen=True, eq=False)
class Ends:
    """Which runs stages may hold.

    Attributes:
        spans: Per run, the stages that may hold its layers.
        members: The same with the ends of all runs, if it has those of the long runs alone.
    """

    spans: tuple[range, ...]
    members: tuple[Ends, ...] = ()

    @staticmethod
    def merged(members: Sequence[Ends]) -> Ends:
        """What some of these choices open."""
        if len(members) == 1:
            return members[0]
        spans = zip(*(each.spans for each in members), strict=True)
        return Ends(
            tuple(range(min(s.start for s in some), max(s.stop for s in some)) for some in spans), tuple(members)
        )

    @cached_property
    def parts(self) -> list[Ends]:
        """The members, merged by where the first run ends on which they differ; none if there are no members."""
        for run in range(len(self.spans)):
            groups: dict[int, list[Ends]] = {}
            for member in self.members:
                groups.setdefault(member.spans[run].stop, []).append(member)
            if len(groups) > 1:
                return [Ends.merged(group) for group in groups.values()]
        return []

    def opened(self, inst: Instance) -> tuple[Open, ...]:
        """Per device and chunk, the runs that it may hold."""
        runs = [tuple(r for r, span in enumerate(self.spans) if s in span) for s in range(inst.stages)]
        return tuple(tuple(runs[s] for s in device.stages) for device in inst.devices)


def long_runs(inst: Instance) -> list[int]:
    """The runs of more layers than devices."""
    return [r for r, count in enumerate(inst.counts) if count > len(inst.devices)]


def ends_of_long_runs(inst: Instance) -> list[Ends]:
    """Every choice of the stages in which long runs end; short ones may stand wherever some order lets them."""
    long = long_runs(inst)
    members: dict[tuple[int, ...], list[Ends]] = {}
    for ends in _all_ends(inst):
        spans = tuple(
            range(max(begin, window.start), min(end + 1, window.stop))
            for begin, end, window in zip((0, *ends[:-1]), ends, inst.windows, strict=True)
        )
        members.setdefault(tuple(ends[r] for r in long[:-1]), []).append(Ends(spans))
    return [Ends.merged(each) for each in members.values()]


def _all_ends(inst: Instance) -> Iterator[tuple[int, ...]]:
    """The stage in which each run ends: the next one begins there or in the stage behind it."""
    partial: list[tuple[int, ...]] = [()]
    for count, (window, following) in zip(inst.counts, pairwise(inst.windows), strict=False):
        partial = [
            (*ends, end)
            for ends in partial
            for end in window
            if (before := ends[-1] if ends else 0) <= end <= before + count and following.start <= end + 1
        ]
    return ((*ends, inst.stages - 1) for ends in partial)
