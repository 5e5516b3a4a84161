"""Whether the host has room for what a plan offloads."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError, Placement, Plan, Schedule
from debubble.training.memory_check import check_host_memory, peak_offloaded

SIZE = 10.0


def offloading(plan: Plan) -> Plan:
    """The first two of four micro-batches are on the host together."""
    order = ["0F0", "0O0", "0F1", "0O1", "0F2", "0B2", "0L0", "0B0", "0L1", "0B1", "0F3", "0B3"]
    schedule = Schedule.of("offload", Placement.linear(1), 4, [order])
    costs = db.StageCosts.of(stages=1, activation=SIZE, offload=0.1, reload=0.1)
    return replace(plan, schedule=schedule, costs=costs)


def test_what_is_on_the_host_at_a_time_is_counted(plan_file: Any) -> None:
    assert peak_offloaded(offloading(Plan.load(plan_file(1))).simulate()) == [2 * SIZE]


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_host_without_room_for_offloaded_activations_is_refused(
    plan_file: Any, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    plan = offloading(Plan.load(plan_file(1)))
    on_device = max(plan.simulate().peak_memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2 * SIZE - 1 if gpus else on_device + 2 * SIZE - 1}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    with pytest.raises(InputError, match="this machine has"):
        check_host_memory(plan)
    check_host_memory(plan, offload_to_disk=True)
