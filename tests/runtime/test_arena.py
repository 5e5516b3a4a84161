"""An arena hands out the addresses of its plan and refuses tensors that the plan has no memory for."""

from fractions import Fraction
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import Op, StageCosts
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.arena import ALIGNMENT, GATHERED, Arena, ArenaError
from debubble.simulator import plan_addresses
from tests.support.schedule_cases import offloading

OWNER = (0, 0)
UNIT = 1024


def arena_of(schedule: Any, *, size: int | None = None, **costs: Any) -> Arena:
    """The arena of the first device."""
    full_costs = StageCosts.of(stages=schedule.stages, **costs)
    [plan] = plan_addresses(db.simulate(schedule, full_costs), devices=[0], alignment=ALIGNMENT)
    return Arena(plan, size=size)


def arena_of_units(**options: Any) -> Arena:
    return arena_of(db.schedules["gpipe"](devices=1, micro_batches=2), activation=UNIT, **options)


def split(**options: Any) -> Arena:
    schedule = db.schedules["zb-h1"](devices=2, micro_batches=2)
    return arena_of(schedule, activation=UNIT, activation_after_input=UNIT // 4, **options)


def reloaded(**options: Any) -> Arena:
    schedule = offloading(db.schedules["gpipe"](devices=1, micro_batches=2))
    return arena_of(schedule, activation=UNIT, offload=1, **options)


def run(arena: Arena, *names: str) -> None:
    """Begin operations, and end all but the last."""
    for name in names[:-1]:
        arena.begin(Op.parse(name))
        arena.end(Op.parse(name))
    arena.begin(Op.parse(names[-1]))


def test_a_byte_more_than_planned_is_refused() -> None:
    arena = arena_of_units()
    run(arena, "0F0")
    arena.count(OWNER, UNIT - 1)
    expected = r"Device 0 asks for 2 bytes more of stage 0's sequence 0, 1,025 in all, where the plan has 1,024\."
    with pytest.raises(ArenaError, match=expected):
        arena.count(OWNER, 2)


def test_an_arena_that_is_a_byte_too_small_is_refused() -> None:
    arena = arena_of_units(size=2 * UNIT - 1)
    run(arena, "0F0")
    expected = r"0F1 asks for 1,024 bytes at 1,024 on device 0, whose arena has 2,047\."
    with pytest.raises(ArenaError, match=expected):
        arena.begin(Op.parse("0F1"))


def test_addresses_that_are_not_free_are_refused() -> None:
    arena = arena_of(db.schedules["1f1b"](devices=2, micro_batches=3), activation=UNIT)
    run(arena, "0F0", "0F1")
    expected = r"0F2 asks for 1,024 bytes at 0 on device 0, where 1,024 bytes of 0F0 at 0 are live\."
    with pytest.raises(ArenaError, match=expected):
        arena.begin(Op.parse("0F2"))


def test_bytes_counted_after_their_release_are_refused() -> None:
    arena = arena_of_units()
    run(arena, "0F0", "0B0")
    arena.count(OWNER, 1)
    with pytest.raises(ArenaError, match="0B0 has ended on device 0, and 1 bytes of stage 0's sequence 0 are still"):
        arena.end(Op.parse("0B0"))


def test_input_gradient_leaves_only_what_w_needs() -> None:
    arena = split()
    run(arena, "0F0", "0I0")
    arena.count(OWNER, UNIT // 4)
    arena.end(Op.parse("0I0"))
    with pytest.raises(ArenaError, match="257 in all, where the plan has 256"):
        arena.count(OWNER, 1)


def test_gathered_parameters_have_a_separate_capacity() -> None:
    schedule = db.schedules["1f1b"](devices=1, micro_batches=1)
    arena = arena_of(schedule, gathered=UNIT, parameter_gather=1, static=UNIT)
    run(arena, "0UNSHARD_F0")
    arena.count(GATHERED, UNIT)
    with pytest.raises(ArenaError, match="bytes more of gathered parameters, 1,025 in all"):
        arena.count(GATHERED, 1)


def test_a_reload_is_placed_at_its_planned_offset() -> None:
    arena = reloaded()
    [tensor] = [t for t in arena.plan.tensors if t.allocated_by == Op.parse("0L1")]
    place = arena.placer(Op.parse("0L1"))
    first, second = place(10), place(100)
    assert first is not None
    assert second is not None
    base = arena.tensor_at(0, 1).data_ptr()
    assert first.data_ptr() - base == tensor.offset
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    assert [t.untyped_storage().nbytes() for t in (first, second)] == [10, 100]


def test_tensor_larger_than_planned_is_not_placed() -> None:
    place = reloaded().placer(Op.parse("0L1"))
    assert place(UNIT + 1) is None
    assert place(UNIT) is not None
    assert place(1) is None


def test_freed_by_w_and_gpu_bytes_get_no_address() -> None:
    schedule = offloading(db.schedules["zb-h1"](devices=2, micro_batches=2))
    arena = arena_of(schedule, activation=UNIT, activation_after_input=UNIT // 4, offload=1)
    on_gpu = Arena(reloaded().plan, device=torch.device("cuda", 0))
    assert arena.placer(Op.parse("0L0"))(1) is on_gpu.placer(Op.parse("0L1"))(1) is None


def test_paused_ledger_does_not_use_the_arena() -> None:
    ledger = Ledger()
    ledger.arena = arena_of_units()
    with ledger.pause():
        ledger.count_gathered(1)
        ledger.count_gathered(-1)


def test_shares_of_bytes_are_rounded_up_to_the_alignment() -> None:
    arena = arena_of(db.schedules["gpipe"](devices=1, micro_batches=1), activation=Fraction(UNIT, 3))
    assert [tensor.size for tensor in arena.plan.tensors] == [384]
