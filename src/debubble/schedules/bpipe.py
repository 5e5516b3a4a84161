"""BPipe: 1F1B that balances memory by moving activations of early stages to late stages.

Source: Kim et al., BPipe, ICML 2023.  Its evictor x and acceptor p - 1 - x are our peers; evict is O, load is L.

Under 1F1B stage s holds p - s micro-batches and stage p - 1 - s holds s + 1.  Stages that would hold more than
n = ceil((p + 2) / 2) hold n: before a forward that would exceed it, the newest complete activation, which is needed
last, is moved to the peer; it returns as soon as a backward has freed memory and it is next.
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
    max_resident = (devices + 3) // 2
    # O follows its forward directly; L follows the operation during which it may start.
    orders = tuple(tuple(with_transfers(order, _evictions(order, max_resident), ahead=1)) for order in plain.orders)
    evictors = [s for s, order in enumerate(orders) if any(op.kind is Kind.O for op in order)]
    return replace(plain, name="bpipe", orders=orders, peers={s: devices - 1 - s for s in evictors})


def _evictions(order: tuple[Op, ...], max_resident: int) -> set[int]:
    """The micro-batches of a stage to evict so that it never holds more than `max_resident`.

    At each forward that would exceed this, the newest resident one is evicted.
    """
    evicted: set[int] = set()
    resident: list[int] = []
    for op in order:
        if op.kind is Kind.F:
            if len(resident) == max_resident:
                evicted.add(resident.pop())
            resident.append(op.micro_batch)
        else:
            resident.remove(op.micro_batch)
            if op.micro_batch + 1 in evicted:
                resident.insert(0, op.micro_batch + 1)
    return evicted
