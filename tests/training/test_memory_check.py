"""The check of host memory before a run, and the message when a device runs out of memory."""

import multiprocessing
import os
import resource
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.costs.host_memory import offloaded_peaks
from debubble.ir import InputError, Placement, Schedule, lower
from debubble.plans import Plan
from debubble.runtime.launch.failures import DeviceMemoryError
from debubble.training.memory_check import check_host_memory, explain_shortage, predicted_at
from tests.support import forked
from tests.support.runtime_cases import LLAMA, plan_of, run_threads, tokens_of

GPU_HOURS: dict[str, Any] = {"micro_batches": 4, "sequence_length": 512, "planner": "merak", "dtype": "fp32"}


@pytest.fixture(scope="module")
def plan() -> db.Plan:
    return db.plan(db.models["llama-tiny"], db.Cluster.parse("2xCPU"), **GPU_HOURS)


def failed_at(name: str, plan: db.Plan) -> DeviceMemoryError:
    instruction = next(i for i in lower(plan.schedule, plan.costs).instructions if i.op.name == name)
    return DeviceMemoryError(instruction, RuntimeError("Tried to allocate 2.00 GiB.\nAnd more lines"))


def test_prediction_is_the_planned_memory_at_the_operation(plan: Any) -> None:
    static = float(plan.costs.static_of(0))
    activation = float(plan.costs.activation[0])
    assert predicted_at(failed_at("0F0", plan), plan) == pytest.approx(static + activation)
    assert predicted_at(failed_at("0F1", plan), plan) == pytest.approx(static + 2 * activation)


def test_shortage_names_operation_bytes_and_a_fitting_plan(plan: Any) -> None:
    error = explain_shortage(failed_at("0F1", plan), plan, memory=predicted_at(failed_at("0F1", plan), plan) + 2**20)
    message = str(error)
    assert message.startswith("Device 0 ran out of memory at 0F1, micro-batch 1: Tried to allocate 2.00 GiB.  It held ")
    assert "raise" not in message
    limit = int(message.split("--memory-limit ")[1].split(":")[0])
    peak = max(plan.simulate().peak_memory)
    assert limit == int(0.9 * float(peak) - 2**20)
    assert "then fits, at " in message


@pytest.mark.slow
def test_advice_for_a_measured_plan_uses_measured_memory() -> None:
    """MLPs measure far above computed costs; planned with computed ones, a step would take almost no time."""
    mlp = {
        "type": "mlp", "count": 8, "forward": 0.1, "backward_input": 0.1, "backward_weight": 0.1, "static": 10**6,
        "strategies": {"none": {"activation": 10**8}, "full": {"activation": 10**6, "recompute": 0.1}},
    }  # fmt: skip
    model, cluster = db.models["llama-tiny"], db.Cluster.parse("2xCPU")
    plan = db.plan(model, cluster, profile={"units": [mlp]}, **{**GPU_HOURS, "planner": "dapple"})
    message = str(explain_shortage(failed_at("0F1", plan), plan, memory=0))
    assert 0.5 < float(message.split("then fits, at ")[1].split(" times")[0]) < 2


def test_smaller_sizes_are_advised_if_no_plan_fits(plan: Any) -> None:
    peak = float(max(plan.simulate().peak_memory))
    message = str(
        explain_shortage(failed_at("0F1", plan), plan, memory=predicted_at(failed_at("0F1", plan), plan) + 0.85 * peak)
    )
    assert "use more devices, smaller micro-batches, or shorter sequences" in message


def run_short_of_memory(sender: Connection) -> None:
    """Report the failure of a step that exceeds the memory limit of this process."""
    plan = plan_of(Schedule.of("one", Placement.linear(1), 1, [["0F0", "0B0"]]), LLAMA)

    def work(pipeline: Any) -> None:
        pipeline.step(tokens_of(LLAMA, rows=1))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
        pipeline.step(tokens_of(LLAMA, rows=64, length=8192))

    try:
        run_threads(plan, work)
    except DeviceMemoryError as error:
        sender.send(str(error))


def test_shortage_reported_by_torchs_allocator_is_named() -> None:
    processes: Any = multiprocessing.get_context(forked.START_METHOD)
    heard, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=run_short_of_memory, args=(sender,))
    process.start()
    sender.close()
    message = heard.recv()
    process.join()
    assert message.startswith("Device 0 ran out of memory at 0F0, micro-batch 0: ")
    assert "tried to allocate" in message


SIZE = 10.0


def offloading(plan: Plan) -> Plan:
    """A plan with the first two of four micro-batches on the host at the same time."""
    order = ["0F0", "0O0", "0F1", "0O1", "0F2", "0B2", "0L0", "0B0", "0L1", "0B1", "0F3", "0B3"]
    schedule = Schedule.of("offload", Placement.linear(1), 4, [order])
    costs = db.StageCosts.of(stages=1, activation=SIZE, offload=0.1, reload=0.1)
    return replace(plan, schedule=schedule, costs=costs)


@pytest.mark.parametrize("gpus", [0, 1])
def test_host_too_small_for_offloaded_activations_is_refused(
    plan_file: Any, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    plan = offloading(Plan.load(plan_file(1)))
    assert offloaded_peaks(plan.simulate()) == [2 * SIZE]
    on_device = max(plan.simulate().peak_memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2 * SIZE - 1 if gpus else on_device + 2 * SIZE - 1}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    with pytest.raises(InputError, match="this machine has"):
        check_host_memory(plan)
    check_host_memory(plan, offload_to_disk=True)
