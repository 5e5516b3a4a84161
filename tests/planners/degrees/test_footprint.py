from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import RunOptions
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.memory import Footprint, footprints
from debubble.planners.degrees.space import Job
from debubble.planners.fits import common_choices
from debubble.planners.fixed_plan import fixed_plan

LLAMA = db.models["llama3-8b"]


def job(*, global_batch: int = 8, **fixed: int) -> Job:
    return Job(
        model=LLAMA, cluster=db.Cluster.parse("8xH100-80GB"), global_batch=global_batch, fixed=fixed,
        options=RunOptions(sequence_length=4096),
    )  # fmt: skip


def of(degrees: Degrees) -> Footprint:
    [found] = [f for f in footprints(job()) if replace(f.degrees, chunks=None) == degrees]
    return found


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 2, 4, 12), (1, 2, 4, 12 / 8), (2, 2, 4 / 8, 12 / 8), (3, 4 / 8, 4 / 8, 8 / 8)],
)
def test_states_are_those_of_the_zero_level(zero: int, weights: float, gradients: float, optimizer: float) -> None:
    parts = of(Degrees(data=8, zero=zero, micro_batches=1)).kept
    assert (parts.weights, parts.gradients, parts.optimizer) == pytest.approx(
        tuple(bytes_ * LLAMA.parameters for bytes_ in (weights, gradients, optimizer))
    )


@pytest.mark.parametrize(
    ("schedule", "recompute", "micro_batches"),
    [("1f1b", "full", 8), ("interleaved", "full", 8), ("interleaved", "none", 13)],
)
def test_the_total_is_the_peak_that_simulation_finds(schedule: str, recompute: str, micro_batches: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    plan = fixed_plan(
        LLAMA, db.Cluster.parse("8xH100-80GB"), schedule=schedule, micro_batches=micro_batches, pipeline=4,
        chunks=chunks, recompute=recompute, tensor=2, sequence_length=4096,
    )  # fmt: skip
    asked = job(global_batch=micro_batches, chunks=chunks, pipeline=4, tensor=2, micro_batch_size=1)
    [found] = [f for f in footprints(asked) if f.degrees.zero == 0]
    parts = found.kept if recompute == "none" else found.recomputed
    peaks = db.simulate(plan.schedule, plan.costs.with_limit(None)).peak_memory
    assert parts.total == pytest.approx(max(map(float, peaks)))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--chunks", "2"), "with interleaved 1F1B of 2 chunks on even stages"),
        (("--data", "8"), "(with ZeRO-3 up to 16 chunks, two of them gathered)"),
    ],
)
def test_the_command_says_what_order_of_the_chunks_fits(run: Any, asked: tuple[str, ...], said: str) -> None:
    code, out, _ = run("fits", "llama3-8b", "--cluster", "8xH100-80GB", *asked)
    assert code == 0
    assert said in " ".join(out.split())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--tensor", "3"), "--tensor 3 cannot divide 8 devices: give degrees whose product divides 8."),
        (("--micro-batches", "0"), "debubble: --micro-batches must be at least 1, not 0.\n"),
    ],
)
def test_the_command_refuses_what_is_not_legal(run: Any, asked: tuple[str, ...], said: str) -> None:
    code, _, err = run("fits", "llama3-8b", "--cluster", "8xH100-80GB", *asked)
    assert code == 2
    assert said in err


def test_a_device_with_zero_3_gathers_a_part_of_its_units_at_a_time() -> None:
    sharded = Job(
        model=db.models["llama3-70b"], cluster=db.Cluster.parse("64xH100-80GB"), global_batch=64,
        fixed={"data": 64, "zero": 3}, options=RunOptions(sequence_length=4096),
    )  # fmt: skip
    [found], [whole] = footprints(sharded), footprints(replace(sharded, fixed={**sharded.fixed, "chunks": 1}))
    assert (found.degrees.chunks, found.fits, whole.fits) == (16, "with recomputation", "no")
    assert found.kept.workspace < whole.kept.workspace / 5


def test_every_choice_has_every_level_once() -> None:
    found = [f.degrees for f in footprints(job(context=1))]
    assert len(set(found)) == len(found)
    levels = [d.zero for d in found if (d.tensor, d.data) == (2, 4)]
    assert levels == [0, 1, 2, 3]
    assert [d.zero for d in found if d.pipeline == 8] == [0]


@pytest.mark.parametrize(
    ("target", "alone", "piped"), [("torchtitan", {0, 2, 3}, {0, 1}), ("megatron", {0, 1, 2, 3}, {0, 1, 2, 3})]
)
def test_the_command_shows_what_a_framework_has(json_of: Any, target: str, alone: set[int], piped: set[int]) -> None:
    found = json_of("fits", "llama3-8b", "--cluster", "8xH100-80GB", "--for", target)["footprints"]
    degrees = [each["degrees"] for each in found]
    assert {d["zero"] for d in degrees if (d["pipeline"], d["data"]) == (1, 8)} == alone
    assert {d["zero"] for d in degrees if (d["pipeline"], d["data"]) == (2, 4)} == piped


def test_a_frameworks_memory_is_that_of_its_plans(json_of: Any) -> None:
    call = ("fits", "llama3-8b", "--cluster", "8xH100-80GB", "--data", "8", "--zero", "3")
    [deepspeed] = json_of(*call, "--for", "deepspeed")["footprints"]
    [priced] = json_of(*call, "--framework", "deepspeed")["footprints"]
    assert deepspeed == priced


def test_the_command_prints_all_choices_as_json(json_of: Any) -> None:
    answer = json_of("fits", "llama3-8b", "--cluster", "8xH100-80GB")
    assert len(answer["footprints"]) == len(footprints(job()))
    assert {row["fits"] for row in answer["footprints"]} == {"yes", "likely", "with recomputation", "no"}
    assert answer["reserve"] == pytest.approx(8 * 2**30)


def test_what_may_take_more_than_there_is_fits_likely() -> None:
    kept = footprints(job())[0]
    capacity = replace(kept, limit=kept.kept.total, memory=1.1 * kept.kept.total)
    assert replace(capacity, most=1.1).fits == "yes"
    assert replace(capacity, most=1.2).fits == "likely"


def test_the_table_says_what_fits_and_what_is_in_json_alone(run: Any) -> None:
    code, out, _ = run("fits", "llama3-8b", "--cluster", "8xH100-80GB")
    assert code == 0
    words = " ".join(out.split())
    assert words.startswith("Yes: of 28 choices 24 fit as they are and 3 fit with full recomputation; the least memory")
    assert "recomputing everything" in words
    assert (
        "choices with context or other expert ranks, slices, or tensor ranks over several nodes, are in --json."
        in words
    )


def test_micro_batches_are_those_of_every_choice(json_of: Any) -> None:
    given = ("fits", "llama3-8b", "--cluster", "8xH100-80GB", "--micro-batches", "3")
    open_batch, one_batch = (
        [row["degrees"] for row in json_of(*given, *more)["footprints"]] for more in ((), ("--global-batch", "12"))
    )
    assert {d["micro_batches"] for d in open_batch} == {3}
    assert {d["data"] for d in open_batch} == {1, 2, 4, 8}
    assert {(d["data"], d["micro_batch_size"]) for d in one_batch} == {(1, 4), (2, 2), (4, 1)}


def test_the_command_remarks_on_mixed_devices_and_large_limits(json_of: Any) -> None:
    answer = json_of("fits", "llama3-8b", "--cluster", "4xA100-40GB+4xA100-80GB", "--memory-limit", "48GiB")
    assert answer["reserve"] == 0
    mixed, beyond = answer["remarks"]
    assert mixed.startswith("A100-40GB and A100-80GB are mixed")
    assert beyond.startswith("The memory limit of 48 GiB is more than the 40 GiB that A100-40GB has")


def test_footprints_leave_out_levels_that_a_framework_refuses() -> None:
    """DeepSpeed steps weights in bf16 under ZeRO alone."""
    asked = replace(job(), options=RunOptions(master_dtype="bf16", framework="deepspeed"), target="deepspeed")
    assert {each.degrees.zero for each in footprints(asked) if each.degrees.pipeline == 1} == {1, 2, 3}


def test_the_python_call_answers_as_the_command() -> None:
    asked = job(tensor=4, pipeline=2)
    found = db.fits("llama3-8b", "8xH100-80GB", tensor=4, pipeline=2, sequence_length=4096)
    assert [each.kept for each in found] == [each.kept for each in footprints(asked) if each.degrees.zero == 0]


def test_a_fractional_degree_is_refused() -> None:
    with pytest.raises(db.InputError, match=r"tensor must be a whole number, not 2\.5"):
        db.fits("llama3-8b", "8xH100-80GB", tensor=2.5)


def test_shown_expert_degrees_need_least_memory() -> None:
    cluster = db.Cluster.parse("8xH100-80GB")
    found = db.fits("mixtral-8x7b", cluster, pipeline=1, tensor=2, zero=1)
    [shown] = common_choices(found, cluster, fixed=["pipeline", "tensor", "zero"])
    assert (shown.degrees.data, shown.degrees.expert) == (4, 4)
    alike = [f for f in found if replace(f.degrees, expert=4) == shown.degrees]
    assert shown.kept.total == min(f.kept.total for f in alike)
