"""BPipe: 1F1B with the activations of early stages moved to the late ones, until all hold about the same.

Source: Kim et al., BPipe, ICML 2023.  Its evictor x and acceptor p - 1 - x are our peers; evict is O, load is L.

Under 1F1B stage s holds p - s micro-batches and stage p - 1 - s holds s + 1.  With n = ceil((p + 2) / 2), stages that
would hold more keep n: when there is no room for a forward, the newest activation that is complete, which is needed
last, goes to the peer; it returns as soon as a backward makes room and it is next.
"""

from __future__ import annotations

from dataclasses import replace

from debubble.ir import Kind, Op, Schedule, StageCosts
from debubble.schedules.one_f_one_b import one_f_one_b
from debubble.schedules.registry import schedule


@schedule(
    "bpipe",
    paper="BPipe, ICML 2023",
    bubble="(p - 1)(f + b)",
    memory="min(m, ceil((p + 2) / 2))",
    peak=lambda p, m, v: min(m, (p + 3) // 2),
)
def bpipe(*, devices: int, micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """1F1B, with stages s and p - 1 - s sharing their memory.  The bound holds under a `memory_limit` that says so."""
    plain = one_f_one_b(devices=devices, micro_batches=micro_batches)
    most = (devices + 3) // 2
    orders = tuple(tuple(_with_transfers(order, most)) for order in plain.orders)
    evictors = [s for s, order in enumerate(orders) if any(op.kind is Kind.O for op in order)]
    return replace(plain, name="bpipe", orders=orders, peers={s: devices - 1 - s for s in evictors})


def _with_transfers(order: tuple[Op, ...], most: int) -> list[Op]:
    """A stage's list with O and L, such that it never holds more than `most` activations.

    O stands right behind its forward; L right behind the operation during which it may start.
    """
    evicted = _evictions(order, most)
    result = []
    for op in order:
        result.append(op)
        if op.kind is Kind.F and op.micro_batch in evicted:
            result.append(Op(Kind.O, op.stage, op.micro_batch))
        elif op.kind is Kind.B and op.micro_batch + 1 in evicted:
            result.append(Op(Kind.L, op.stage, op.micro_batch + 1))
    return result


def _evictions(order: tuple[Op, ...], most: int) -> set[int]:
    """The micro-batches that must leave for a while: at each forward without room, the newest that is there."""
    evicted: set[int] = set()
    here: list[int] = []
    for op in order:
        if op.kind is Kind.F:
            if len(here) == most:
                evicted.add(here.pop())
            here.append(op.micro_batch)
        else:
            here.remove(op.micro_batch)
            if op.micro_batch + 1 in evicted:
                here.insert(0, op.micro_batch + 1)
    return evicted
