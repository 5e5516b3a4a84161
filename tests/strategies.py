"""Hypothesis strategies of all tests."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hypothesis import strategies as st

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Kind, Number, Op, Placement, Schedule, StageCosts
from debubble.ir.schedule import Shares
from debubble.ir.stage_costs import CommunicationModel

times = st.integers(min_value=1, max_value=9)
"""Times whose sums are exact."""


@st.composite
def stage_costs(
    draw: st.DrawFn,
    *,
    stages: int,
    offload: bool = False,
    deeper: bool = False,
    messages: Sequence[CommunicationModel] = ("latency", "exclusive"),
) -> StageCosts:
    """Uneven integer costs of `stages` stages, with one of these communication models."""

    def values_of_stages(minimum: int = 1) -> list[int]:
        return draw(st.lists(st.integers(minimum, 9), min_size=stages, max_size=stages))

    def overlaps() -> list[Number]:
        shares: st.SearchStrategy[Number] = st.sampled_from([0, Fraction(1, 4), Fraction(3, 4), 1])
        return draw(st.lists(shares, min_size=stages, max_size=stages))

    return StageCosts.of(
        stages=stages,
        forward=values_of_stages(),
        backward_input=values_of_stages(),
        backward_weight=values_of_stages(),
        recompute=values_of_stages(),
        activation=[2 * a for a in values_of_stages()],
        activation_recomputed=draw(st.integers(0, 1)),
        recompute_deeper=values_of_stages() if deeper else None,
        activation_deeper=[a - 1 for a in values_of_stages()] if deeper else None,
        communication=draw(st.integers(0, 4)),
        communication_model=draw(st.sampled_from(messages)),
        offload=values_of_stages() if offload else None,
        reload=values_of_stages() if offload else None,
        offload_overlap=overlaps() if offload else 0,
        reload_overlap=overlaps() if offload else 0,
        recompute_overlap=overlaps() if offload else 0,
        host_link=draw(st.sampled_from(["full-duplex", "half-duplex"])),
    )


@st.composite
def placements(draw: st.DrawFn, *, max_stages: int = 6) -> Placement:
    """Any placement in which every device holds a stage."""
    devices = draw(st.integers(1, max_stages))
    rest = draw(st.lists(st.integers(0, devices - 1), max_size=max_stages - devices))
    return Placement.of(draw(st.permutations([*range(devices), *rest])))


@st.composite
def random_schedules(
    draw: st.DrawFn,
    *,
    offload: bool = True,
    max_micro_batches: int = 4,
    deadlocks: bool = False,
    shares: bool = False,
    deeper: bool = False,
) -> Schedule:
    """Correct schedules of any order: a random linear extension of the dependencies, so that nothing deadlocks.

    Backwards are split or not per operation; activations may be recomputed (fused or explicit) and offloaded.  With
    `deadlocks` the dependencies between stages are left out, and most schedules deadlock.  With `shares` fractions are
    recomputed and moved, for all micro-batches or per micro-batch; with `deeper` some R are deeper, which
    `stage_costs(deeper=True)` price.
    """
    placement = draw(placements())
    micro_batches = draw(st.integers(1, max_micro_batches))
    fused = draw(st.frozensets(st.integers(0, placement.stages - 1)))
    chains = [
        _micro_batch(draw, placement, j, offload=offload, fused=fused)
        for j in range(micro_batches)
    ]  # fmt: skip
    orders: list[list[Op]] = [[] for _ in range(placement.devices)]
    pending = {
        op: {b for b in before if b.stage == op.stage or not deadlocks}
        for chain in chains
        for op, before in chain.items()
    }
    while pending:
        ready = sorted((op for op, before in pending.items() if not before), key=lambda op: op.name)
        op = draw(st.sampled_from(ready))
        del pending[op]
        for before in pending.values():
            before.discard(op)
        orders[placement.device_of[op.stage]].append(op)
    recomputed = sorted(op[1:] for chain in chains for op in chain if op.kind is Kind.R)
    return Schedule(
        name="random",
        placement=placement,
        micro_batches=micro_batches,
        orders=tuple(map(tuple, orders)),
        fused_recompute=fused,
        deeper=draw(st.frozensets(st.sampled_from(recomputed))) if deeper and recomputed else frozenset(),
        recompute_fraction=draw(_shares(placement.stages, micro_batches)) if shares else {},
        offload_fraction=draw(_shares(placement.stages, micro_batches)) if shares else {},
    )


def _shares(stages: int, micro_batches: int) -> st.SearchStrategy[Shares]:
    """Fractions of some stages, each for all micro-batches or per micro-batch."""
    share: st.SearchStrategy[Number] = st.sampled_from([0, Fraction(1, 4), Fraction(1, 2), 1])
    per_micro_batch = st.lists(share, min_size=micro_batches, max_size=micro_batches).map(tuple)
    return st.dictionaries(st.integers(0, stages - 1), share | per_micro_batch)


def _micro_batch(
    draw: st.DrawFn, placement: Placement, j: int, *, offload: bool, fused: frozenset[int]
) -> dict[Op, set[Op]]:
    """Operations of one micro-batch, each with its predecessors."""
    before: dict[Op, set[Op]] = {}
    for s in range(placement.stages):
        before[Op(Kind.F, s, j)] = {Op(Kind.F, s - 1, j)} if s else set()
    gradient: Op | None = None
    for s in reversed(range(placement.stages)):
        last = Op(Kind.F, s, j)
        if offload and draw(st.booleans()):
            before[Op(Kind.O, s, j)] = {last}
            before[Op(Kind.L, s, j)] = {Op(Kind.O, s, j)}
            last = Op(Kind.L, s, j)
        if s not in fused and draw(st.booleans()):
            before[Op(Kind.R, s, j)] = {last}
            last = Op(Kind.R, s, j)
        split = draw(st.booleans())
        backward = Op(Kind.I if split else Kind.B, s, j)
        before[backward] = {last} | ({gradient} if gradient else set())
        if split:
            before[Op(Kind.W, s, j)] = {backward}
        gradient = backward
    return before


@st.composite
def model_units(draw: st.DrawFn, *, max_layers: int = 5, limit: bool = False) -> Units:
    """A small model: embedding, equal layers of attention and MLP, head, with integer costs."""

    def unit(type_: str, layer: int | None, forward: int, activation: int) -> Unit:
        return Unit(
            type=type_,
            layer=layer,
            forward=forward,
            backward_input=forward,
            backward_weight=forward,
            static=activation,
            strategies={
                "none": Strategy(4 * activation),
                "selective": Strategy(3 * activation, 1),
                "full": Strategy(activation, forward),
            },
        )

    attention, mlp, head = draw(times), draw(times), draw(times)
    layers = draw(st.integers(1, max_layers))
    body = [
        u for i in range(layers) for u in (unit("attention", i, attention, 2), unit("mlp", i, mlp, draw(st.just(3))))
    ]
    return Units(
        units=(unit("embedding", None, 1, 1), *body, unit("head", None, head, 2)),
        communication=draw(st.integers(0, 2)),
        communication_within_node=draw(st.sampled_from([None, 0])),
        devices_per_node=draw(st.integers(1, 3)),
        memory_limit=(draw(st.integers(20, 200)),) if limit else None,
    )
