from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.simulator.shared_cores import run_shared


def program(name: str, devices: int, micro_batches: int, **costs: Any) -> db.Program:
    stage_costs = db.StageCosts.of(stages=devices, **costs)
    return db.lower(db.schedules[name](devices=devices, micro_batches=micro_batches, costs=stage_costs), stage_costs)


times = st.integers(1, 9)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), times, times, st.integers(0, 5), st.sampled_from(["1f1b", "gpipe"]))
def test_a_core_for_every_device_is_the_plain_simulation(
    devices: Any, m: Any, forward: Any, backward: Any, communication: Any, name: Any
) -> None:
    lowered = program(name, devices, m, forward=forward, backward_input=backward, communication=communication)
    shared, plain = run_shared(lowered, cores=devices), db.simulate(lowered)
    assert shared.starts == plain.starts
    assert shared.ends == plain.ends


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), times, times)
def test_one_core_is_never_idle(devices: Any, m: Any, forward: Any, backward: Any) -> None:
    lowered = program("1f1b", devices, m, forward=forward, backward_input=backward, backward_weight=0)
    assert run_shared(lowered, cores=Fraction(1)).makespan == devices * m * (forward + backward)


def test_two_busy_devices_on_one_core_run_at_half_speed() -> None:
    # Device 0 has the core for F0 in [0, 1]; then 0F1 and 1F0 share it.
    timeline = run_shared(program("gpipe", 2, 2, forward=1, backward_input=1, backward_weight=0), cores=Fraction(1))
    ops = timeline.by_name
    assert (ops["0F0"].start, ops["0F0"].end) == (0, 1)
    assert (ops["0F1"].start, ops["0F1"].end) == (1, 3)
    assert (ops["1F0"].start, ops["1F0"].end) == (1, 3)
    assert (ops["1F1"].start, ops["1F1"].end) == (3, 4)


def test_an_offload_is_copied_by_a_core() -> None:
    costs = db.StageCosts.of(stages=1, forward=2, backward_input=2, backward_weight=0, offload=2)
    schedule = db.Schedule.of("offload", db.Placement.looped(1), 2, [["0F0", "0O0", "0F1", "0B1", "0L0", "0B0"]])
    ops = run_shared(db.lower(schedule, costs), cores=1).by_name
    # The offload and the second forward both take 2 and share the core.
    assert (ops["0O0"].start, ops["0O0"].end) == (ops["0F1"].start, ops["0F1"].end) == (2, 6)


def test_a_deadlock_is_named_by_its_cycle() -> None:
    schedule = db.Schedule.of("stuck", db.Placement.looped(1, 2), 1, [["1F0", "0F0", "1B0", "0B0"]])
    costs = db.StageCosts.of(stages=2)
    with pytest.raises(db.DeadlockError, match="1F0 waits for 0F0 waits for 1F0"):
        run_shared(db.lower(schedule, costs), cores=1)
