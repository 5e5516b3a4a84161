from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import InputError, Kind, Number, OutOfMemoryError, Schedule, StageCosts, check
from debubble.schedules import schedules
from debubble.simulator import simulate

FAMILY = ("1f1b", "strawman", "dependency-relaxed", "obscura")


def costs_of(p: int, r: Number, **entries: object) -> StageCosts:
    """The paper's unit costs: f = 1, b = 2, and recomputation r."""
    return StageCosts.of(stages=p, forward=1, backward_input=1, backward_weight=1, recompute=r, **entries)  # type: ignore[arg-type]


def build(name: str, p: int, m: int, k: int, **options: Any) -> Schedule:
    key = "recomputed_stages" if name == "1f1b" else "adjusted_stages"
    return schedules[name](devices=p, micro_batches=m, **{**options, key: k + 1})


def closed_form(name: str, p: int, m: int, k: int, r: Number) -> Number:
    q, base = p - k - 1, 3 * (m + p - 1)
    match name:
        case "1f1b":
            return base + r * (max(1, m - q) + k)
        case "strawman":
            return base + r * (max(1, m - 3 * q) + k)
        case _:
            return base + max(r, m * r - 3 * q) + k * r


def equation_3(p: int, m: int, k: int, r: Number) -> Number:
    """The paper's recursion from the last stage down, with T_p = 0."""
    time: Number = 0
    for s in reversed(range(p)):
        gamma = 3 + r
        time = 3 * m + 3 * (p - s - 1) if s > k else max(time + gamma, gamma * m + (k - s) * gamma)
    return time


@st.composite
def settings_of_the_paper(draw: st.DrawFn) -> tuple[int, int, int, Fraction]:
    """(p, m, k, r) with p in 2..12, m in 1..48, any k, and r in [0, f]."""
    p = draw(st.integers(2, 12))
    return p, draw(st.integers(1, 48)), draw(st.integers(0, p - 1)), Fraction(draw(st.integers(0, 100)), 100)


@given(settings_of_the_paper(), st.sampled_from(FAMILY))
@settings(max_examples=60)
def test_step_time_is_the_closed_form(setting: tuple[int, int, int, Fraction], name: str) -> None:
    p, m, k, r = setting
    time = simulate(build(name, p, m, k), costs_of(p, r)).makespan
    assert time == closed_form(name, p, m, k, r)
    assert name != "obscura" or time == equation_3(p, m, k, r)


GOLDEN = {
    "strawman": ("F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 B4 F7 B5 B6 B7", "F0 F1 F2 F3 B0 B1 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"),
    "dependency-relaxed": (
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
    ),
    "obscura": ("F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7", "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_orders_of_figure_9(name: str) -> None:
    last = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    orders = [" ".join(f"{op.kind.value}{op.micro_batch}" for op in order) for order in build(name, 3, 8, 1).orders]
    assert orders == [*GOLDEN[name], last]


@pytest.mark.parametrize(
    ("name", "half", "full", "peaks"),
    [
        ("1f1b", 34, 38, (3, 2, 1)),
        ("strawman", 33, 36, (7, 4, 1)),
        ("dependency-relaxed", Fraction(63, 2), 36, (7, 4, 1)),
        ("obscura", Fraction(63, 2), 36, (5, 4, 1)),
    ],
)
def test_golden_times_and_peaks(name: str, half: Number, full: Number, peaks: tuple[int, ...]) -> None:
    schedule = build(name, 3, 8, 1)
    assert simulate(schedule, costs_of(3, Fraction(1, 2))).makespan == half
    timeline = simulate(schedule, costs_of(3, 1, activation_recomputed=1))
    assert (timeline.makespan, timeline.peak_memory) == (full, peaks)


@pytest.mark.parametrize(("m", "migrated"), [(16, 2), (64, 10)])
def test_minimal_variant_migrates_the_fewest_forwards(m: int, migrated: int) -> None:
    schedule = build("obscura-minimal", 8, m, 2, costs=costs_of(8, Fraction(39, 100)))
    assert next(i for i, op in enumerate(schedule.orders[2]) if op.kind is Kind.B) == 6 + migrated


def test_stages_beyond_the_limit_are_adjusted_by_default() -> None:
    costs = costs_of(8, 1, activation=10, static=3, memory_limit=45)
    assert schedules["strawman"](devices=8, micro_batches=32, costs=costs).fused_recompute == {0, 1, 2, 3}
    assert schedules["obscura"](devices=8, micro_batches=4, costs=costs).fused_recompute == frozenset()


def test_more_adjusted_stages_than_devices_are_refused() -> None:
    with pytest.raises(InputError, match="between 0 and 4"):
        build("obscura", 4, 8, 4)


def swapped_limit(p: int, m: int, k: int, blocks: int, beta: Number) -> list[Number]:
    """Equation (1) with lambda_s = lambda_k + (k - s), in kept activations of the adjusted stages."""
    limits: list[Number] = []
    for s in range(p):
        mu = min(3 * (p - k) - 2 + (k - s), m)
        limits.append(mu - beta * min(blocks + k - s, mu - 2) if s <= k else min(p - s, m))
    return limits


@given(st.integers(3, 8), st.sampled_from([1, Fraction(1, 2), Fraction(1, 3)]), st.data())
@settings(max_examples=20)
def test_swapping_keeps_the_bytes_of_equation_1(p: int, beta: Number, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, p - 2))
    m = data.draw(st.integers(3 * (p - k) - 2 + k, 40))
    blocks = data.draw(st.integers(1, 3 * (p - k) - 4))
    limits = swapped_limit(p, m, k, blocks, beta)
    costs = costs_of(p, 1, activation_recomputed=1, offload=data.draw(st.integers(1, 4)), memory_limit=limits)
    schedule = build("obscura", p, m, k, swapped_blocks=blocks, swapped_fraction=beta)
    check(schedule)
    assert simulate(schedule, costs).peak_memory == tuple(limits)
    tighter = costs.with_limit([limit - Fraction(1, 100) for limit in limits])
    with pytest.raises(OutOfMemoryError):
        simulate(schedule, tighter)


@given(st.integers(3, 8), st.data())
@settings(max_examples=15)
def test_swapping_in_the_papers_range_is_hidden(p: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, p - 3))
    m = data.draw(st.integers(3 * (p - k) - 2 + k, 40))
    blocks = data.draw(st.integers(1, p - k - 2))
    costs = costs_of(p, 1, activation_recomputed=1, offload=1, memory_limit=swapped_limit(p, m, k, blocks, 1))
    time = simulate(build("obscura", p, m, k, swapped_blocks=blocks), costs).makespan
    assert time == closed_form("obscura", p, m, k, 1)


def test_the_three_phases_of_swapping() -> None:
    """With p - k = 3, mu is 7; with lambda = 3, blocks 2..4 leave in the warm-up, 9 in all, and 3 return at the end."""
    order = build("obscura", 3, 13, 0, swapped_blocks=3).orders[0]
    names = [f"{op.kind.value}{op.micro_batch}" for op in order]
    assert names[:10] == ["F0", "F1", "F2", "O2", "F3", "O3", "F4", "O4", "F5", "O5"]
    assert names[10:20] == ["F6", "O6", "B0", "L2", "F7", "O7", "B1", "L3", "F8", "O8"]
    last_forward = names.index("F12")
    assert [name for name in names[last_forward:] if name[0] in "OL"] == ["L8", "L9", "L10"]


def test_swapped_blocks_are_limited_by_the_warm_up() -> None:
    schedule = build("obscura", 4, 4, 1, swapped_blocks=9)
    assert sum(op.kind is Kind.O for op in schedule.orders[0]) == 2


def test_swapping_with_a_peer_moves_memory_to_the_paired_device() -> None:
    costs = costs_of(4, 1, activation=10, activation_recomputed=2, recompute_workspace=0, offload=1)
    plain = simulate(build("obscura", 4, 12, 1), costs).peak_memory
    host = simulate(build("obscura", 4, 12, 1, swapped_blocks=2), costs).peak_memory
    peer = simulate(build("obscura", 4, 12, 1, swapped_blocks=2, destination="peer"), costs).peak_memory
    assert peer[0] == host[0] < plain[0]
    assert host[3] == plain[3] < peer[3]


def test_a_stage_without_a_later_device_cannot_swap_with_a_peer() -> None:
    with pytest.raises(InputError, match="Only 2 of 4 stages"):
        build("obscura", 4, 12, 2, swapped_blocks=1, destination="peer")


@pytest.mark.parametrize(
    "option",
    [
        {"migrated_forwards": -1}, {"swapped_blocks": -1}, {"swapped_fraction": 0}, {"swapped_fraction": 1.5},
        {"destination": "disk"},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        build("obscura-minimal", 4, 8, 1, **{"migrated_forwards": 2, **option})
