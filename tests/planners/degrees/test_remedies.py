import json
import re
from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.errors import HostMemoryError
from debubble.ir import RunOptions
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.memory import too_large
from debubble.planners.degrees.remedies import MAX_REMEDIES, Misfit, Remedy, misfit, remedies
from debubble.planners.degrees.shortlist import min_state_bytes, shortlist
from debubble.planners.degrees.space import Job, smallest_batches
from debubble.planners.problem import Problem

LLAMA = db.models["llama3-8b"]


def job(cluster: str = "8xH100-80GB", *, length: int = 4096, batch: int = 8, **fixed: int) -> Job:
    return Job(
        model=LLAMA, cluster=db.Cluster.parse(cluster), global_batch=batch, fixed=fixed,
        options=RunOptions(sequence_length=length),
    )  # fmt: skip


@pytest.mark.slow
def test_slices_are_suggested_for_a_long_sequence() -> None:
    asked = job(length=131072, pipeline=8)
    first, *more = remedies(asked)
    assert first.degrees.slices > 1
    assert first.change == f"--pipeline 8 --slices {first.degrees.slices}"
    assert len(more) < MAX_REMEDIES
    free = job(length=131072)
    assert first.step_time == quick_step(free.problem(first.degrees))[0]


def test_too_few_devices_get_hosts_lora_and_more_devices() -> None:
    changes = [remedy.change for remedy in remedies(job("1xH100-80GB"))]
    assert changes[0].startswith("--for deepspeed --host-optimizer 1")
    assert changes[1].startswith("--lora 16")
    assert any(change.startswith("--cluster 2xH100-80GB") for change in changes)


@pytest.mark.slow
def test_fewer_devices_with_host_optimizers_come_before_more() -> None:
    asked = Job(
        model=db.models["llama3.2-3b"], cluster=db.Cluster.parse("1xRTX4090-24GB"), global_batch=4,
        options=RunOptions(sequence_length=2048),
    )  # fmt: skip
    host, more = (remedy for remedy in remedies(asked) if "--cluster" in remedy.change)
    assert (host.degrees.devices, host.on_host) == (2, "optimizers")
    assert " (optimizers on the host): " in str(host)
    assert (more.degrees.devices, more.on_host) == (4, None)
    assert more.step_time < host.step_time


def test_bf16_gradients_are_suggested_if_they_fit() -> None:
    asked = Job(
        model=LLAMA, cluster=db.Cluster.parse("2xA100-80GB").with_limit("68GiB"), global_batch=2,
        options=RunOptions(sequence_length=1024),
    )  # fmt: skip
    (fitting,) = (remedy for remedy in remedies(asked) if remedy.change.startswith("--gradient-dtype bf16"))
    assert fitting.change == "--gradient-dtype bf16 --for primus --pipeline 2"
    options = replace(asked.options, gradient_dtype="bf16", framework="megatron-lm")
    small = replace(asked, options=options, target="primus")
    assert fitting.step_time == quick_step(small.problem(fitting.degrees))[0]


def test_the_totals_are_eighteen_and_six_bytes_per_parameter() -> None:
    gib = 2**30
    states, hosted = 18 * LLAMA.parameters / gib, 6 * LLAMA.parameters / gib
    assert Misfit(job=job(), reason="Why.", remedies=()).states == (
        f"One copy of the model's states is {states:.2f} GiB ({hosted:.2f} GiB with the optimizer on the host), and a"
        " plan may use 576.00 GiB on all 8 devices together, activations included."
    )
    text = str(Misfit(job=job(), reason="It needs more, but a plan may use 576.00 GiB on all 8 devices.", remedies=()))
    assert text.count("576.00 GiB") == 1


def test_the_message_says_that_no_change_fits() -> None:
    asked = Job(
        model=db.models["gpt3-175b"], global_batch=1, options=RunOptions(sequence_length=2048, lora=16),
        cluster=db.Cluster.from_dict({"devices": "1xA100-40GB", "memory_limit": ["1GiB"]}),
    )  # fmt: skip
    assert str(misfit(asked, "Why.")).endswith("No change was found that fits.")


def test_the_message_says_that_the_deadline_passed() -> None:
    result = misfit(replace(job("1xA100-40GB"), deadline=0.0), "Why.")
    assert result.remedies == ()
    assert str(result).endswith("The deadline passed before a change was found that fits.")


def test_the_message_has_one_line_per_remedy() -> None:
    fitting = [Remedy(change=change, degrees=Degrees(), step_time=2.0) for change in ("--lora 16", "--zero 3")]
    assert str(Misfit(job=job(), reason="Why.", remedies=tuple(fitting))).split("\n") == [
        "Nothing fits 8xH100-80GB with 8 sequences of 4096 tokens per step.",
        "Why.",
        Misfit(job=job(), reason="Why.", remedies=()).states,
        "What fits (tried, by quick plans); add one of these:",
        "  --lora 16: 2 s per step",
        "  --zero 3: 2 s per step",
    ]


def test_the_message_is_wrapped_to_the_terminals_width(run: Any) -> None:
    asked = ("llama3-8b", "--cluster", "1xA100-40GB", "--sequence-length", "512", "--memory-limit", "1GiB")
    code, _, err = run("plan", *asked, "--micro-batches", "1", "--lora", "16", "--quantize", "nf4-dq")
    assert (code, max(map(len, err.splitlines())) <= 80) == (1, True)
    assert err.splitlines()[-1].startswith("  --cluster 8xA100-40GB --for automodel --tensor 8: ")


def test_a_quick_plan_respects_the_hosts_memory() -> None:
    def asked(host: str) -> Problem:
        cluster = db.Cluster.from_dict({"devices": "4xH100-80GB", "host_memory": host})
        options = RunOptions(sequence_length=4096, host_optimizer=1.0)
        hosted = Job(model=LLAMA, cluster=cluster, global_batch=8, fixed={"pipeline": 4}, options=options)
        return hosted.problem(Degrees(pipeline=4, micro_batches=8))

    quick_step(asked("37GiB"))
    assert too_large(asked("30GiB")) is None
    with pytest.raises(HostMemoryError, match=r"of its host's memory, which has 30\.00 GiB"):
        quick_step(asked("30GiB"))


def test_quantization_is_suggested_where_lora_does_not_fit() -> None:
    small = db.Cluster.from_dict({"devices": "1xRTX4090-24GB", "memory_limit": ["9GiB"]})
    first, *_ = remedies(replace(job(), cluster=small))
    assert first.change.startswith("--lora 16 --quantize nf4-dq ")


def test_a_change_beyond_the_runtime_names_a_framework() -> None:
    # debubble's runtime does not quantize the scales of weights that tensor-parallel ranks divide.
    asked = Job(
        model=db.models["llama3.1-70b"], cluster=db.Cluster.parse("2xRTX4090-24GB"), global_batch=16,
        options=RunOptions(sequence_length=2048, lora=16, quantize="nf4"),
    )  # fmt: skip
    changes = [remedy.change for remedy in remedies(asked)]
    assert changes == [
        "--quantize nf4-dq --sequence-length 512 --for automodel --tensor 2",
        "--cluster 4xRTX4090-24GB --pipeline 2 --tensor 2",
    ]


def test_no_change_is_tried_after_the_deadline() -> None:
    asked = replace(job("1xH100-80GB"), deadline=0.0)
    assert remedies(asked) == []


def test_the_shortlist_has_choices_whose_states_may_fit() -> None:
    asked = Job(model=db.models["llama3-70b"], cluster=db.Cluster.parse("16xH100-80GB"), global_batch=16)
    limit = max(asked.cluster.memory_limits)
    selected = shortlist(asked)
    fitting = [degrees for degrees in smallest_batches(asked) if too_large(asked.problem(degrees)) is None]
    assert {*selected.choices} >= {degrees for degrees in fitting if min_state_bytes(asked, degrees) <= limit} - {
        degrees for degrees in fitting if degrees.zero == 0 and degrees.data > 1
    }
    assert all(min_state_bytes(asked, degrees) <= limit for degrees in selected.choices)


def test_a_planner_of_one_stage_per_device_refuses_chunks(run: Any) -> None:
    code, _, err = run(
        "plan", "gpt2-tiny", "--cluster", "2xCPU", "--chunks", "2", "--planner", "adapipe", "--sequence-length", "64"
    )
    assert code == 2
    assert err.startswith("debubble: This planner holds one stage per device, and --chunks asks for 2: leave it out")


def test_a_schedules_name_suggests_the_planner(run: Any) -> None:
    code, _, err = run("plan", "gpt2-tiny", "--cluster", "2xCPU", "--planner", "1f1b")
    assert (code, err) == (
        2,
        "debubble: There is no planner '1f1b', which is a schedule; did you mean 'megatron-even'?\n",
    )


def test_given_degrees_with_zero_are_suggested_once() -> None:
    changes = [remedy.change for remedy in remedies(job("8xA100-40GB", batch=32, data=8, zero=0))]
    assert changes[0] == "--data 8 --zero 3"
    assert len(changes) == len(set(changes))


def test_a_suggested_change_gives_the_quoted_step(run: Any) -> None:
    call = ("plan", "qwen3-4b", "--cluster", "4xA100-40GB", "--micro-batches", "16")
    code, _, err = run(*call, "--planner", "dapple")
    assert code == 1
    (change, quoted) = re.findall(r"^  (.*--data 4.*): (.*) s per step$", err, re.MULTILINE)[0]
    code, answer, _ = run(*call, *change.split(), "--effort", "0.1", "--json")
    assert code == 0
    assert json.loads(answer)["step_time"] == pytest.approx(float(quoted), rel=0.01)


def test_suggestions_leave_out_the_planner_option() -> None:
    result = Misfit(job=job(), reason="Why.", remedies=(Remedy(change="--zero 3", degrees=Degrees(), step_time=2.0),))
    assert "\nWhat fits without --planner dapple (tried, by quick plans); add" in str(replace(result, planner="dapple"))
