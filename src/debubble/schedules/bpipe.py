"""BPipe: 1F1B with the activations of early stages moved to the late ones, until all hold about the same.

Source: Kim et al., BPipe, ICML 2023.  Its evictor x and acceptor p - 1 - x are our peers; evict is O, load is L.

Under 1F1B stage s holds p - s micro-batches and stage p - 1 - s holds s + 1.  With n = ceil((p + 2) / 2), stages that
would hold more keep n: when there is no room for a forward, the newest activation that is complete, which is needed
last, goes to the peer; it returns as soon as a backward makes room and it is next.
"""

from __future__ import annotations

from dataclasses import replace

from debubble.ir import Kind, Op, Schedule, StageCosts
from debubble.schedules.one_f_one_b import one_f_one_b, with_transfers
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
    # O stands right after its forward; L right after the operation during which it may start.
    orders = tuple(tuple(with_transfers(order, _evictions(order, most), ahead=1)) for order in plain.orders)
    evictors = [s for s, order in enumerate(orders) if any(op.kind is Kind.O for op in order)]
    return replace(plain, name="bpipe", orders=orders, peers={s: devices - 1 - s for s in evictors})


def _evictions(order: tuple[Op, ...], most: int) -> set[int]:
    """The micro-batches of a stage that must leave for a while, so that it never holds more than `most`.

    At each forward without room it is the newest that is there.
    """
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
