from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import debubble as db
from debubble.ir import RunOptions
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.memory import Footprint, footprints
from debubble.planners.degrees.space import Job
from debubble.planners.fits import common_choices
from debubble.planners.fixed_plan import fixed_plan
from debubble.views.memory_table import render_footprints

LLAMA = db.models["llama3-8b"]


def job(*, global_batch: int = 8, **fixed: int) -> Job:
    return Job(
        model=LLAMA, cluster=db.Cluster.parse("8xH100-80GB"), global_batch=global_batch, fixed=fixed,
        options=RunOptions(sequence_length=4096),
    )  # fmt: skip


def footprint_of(degrees: Degrees) -> Footprint:
    [footprint] = [f for f in footprints(job()) if replace(f.degrees, chunks=None) == degrees]
    return footprint


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 2, 4, 12), (1, 2, 4, 12 / 8), (2, 2, 4 / 8, 12 / 8), (3, 4 / 8, 4 / 8, 8 / 8)],
)
def test_states_are_divided_by_the_zero_level(zero: int, weights: float, gradients: float, optimizer: float) -> None:
    memory = footprint_of(Degrees(data=8, zero=zero, micro_batches=1)).kept
    assert (memory.weights, memory.gradients, memory.optimizer) == pytest.approx(
        tuple(bytes_ * LLAMA.parameters for bytes_ in (weights, gradients, optimizer))
    )


@pytest.mark.parametrize(
    ("schedule", "recompute", "micro_batches"),
    [("1f1b", "full", 8), ("interleaved", "full", 8), ("interleaved", "none", 13)],
)
def test_the_total_is_the_peak_of_the_simulation(schedule: str, recompute: str, micro_batches: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    plan = fixed_plan(
        LLAMA, db.Cluster.parse("8xH100-80GB"), schedule=schedule, micro_batches=micro_batches, pipeline=4,
        chunks=chunks, recompute=recompute, tensor=2, sequence_length=4096,
    )  # fmt: skip
    asked = job(global_batch=micro_batches, chunks=chunks, pipeline=4, tensor=2, micro_batch_size=1)
    [footprint] = [f for f in footprints(asked) if f.degrees.zero == 0]
    memory = footprint.kept if recompute == "none" else footprint.recomputed
    peaks = db.simulate(plan.schedule, plan.costs.with_limit(None)).peak_memory
    assert memory.total == pytest.approx(max(map(float, peaks)))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--chunks", "2"), "with interleaved 1F1B of 2 chunks on even stages"),
        (("--data", "8"), "(with ZeRO-3 up to 16 chunks, two of them gathered)"),
    ],
)
def test_the_command_names_the_order_of_chunks_that_fits(run: Any, asked: tuple[str, ...], sentence: str) -> None:
    code, out, _ = run("fits", "llama3-8b", "--cluster", "8xH100-80GB", *asked)
    assert code == 0
    assert sentence in " ".join(out.split())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("--tensor", "3"), "--tensor 3 cannot divide 8 devices: give degrees whose product divides 8."),
        (("--micro-batches", "0"), "debubble: --micro-batches must be at least 1, not 0.\n"),
    ],
)
def test_the_command_refuses_illegal_degrees(run: Any, asked: tuple[str, ...], message: str) -> None:
    code, _, err = run("fits", "llama3-8b", "--cluster", "8xH100-80GB", *asked)
    assert code == 2
    assert message in err


def test_zero_3_gathers_one_of_many_chunks_at_a_time() -> None:
    sharded = Job(
        model=db.models["llama3-70b"], cluster=db.Cluster.parse("64xH100-80GB"), global_batch=64,
        fixed={"data": 64, "zero": 3}, options=RunOptions(sequence_length=4096),
    )  # fmt: skip
    [chunked], [undivided] = footprints(sharded), footprints(replace(sharded, fixed={**sharded.fixed, "chunks": 1}))
    assert (chunked.degrees.chunks, chunked.fits, undivided.fits) == (16, "with recomputation", "no")
    assert chunked.kept.workspace < undivided.kept.workspace / 5


def test_every_choice_has_every_zero_level_once() -> None:
    degrees = [f.degrees for f in footprints(job(context=1))]
    assert len(set(degrees)) == len(degrees)
    levels = [d.zero for d in degrees if (d.tensor, d.data) == (2, 4)]
    assert levels == [0, 1, 2, 3]
    assert [d.zero for d in degrees if d.pipeline == 8] == [0]


@pytest.mark.parametrize(
    ("target", "levels", "piped_levels"),
    [("torchtitan", {0, 2, 3}, {0, 1}), ("megatron", {0, 1, 2, 3}, {0, 1, 2, 3})],
)
def test_the_command_shows_the_zero_levels_of_a_framework(
    json_of: Any, target: str, levels: set[int], piped_levels: set[int]
) -> None:
    rows = json_of("fits", "llama3-8b", "--cluster", "8xH100-80GB", "--for", target)["footprints"]
    degrees = [row["degrees"] for row in rows]
    assert {d["zero"] for d in degrees if (d["pipeline"], d["data"]) == (1, 8)} == levels
    assert {d["zero"] for d in degrees if (d["pipeline"], d["data"]) == (2, 4)} == piped_levels


def test_a_target_and_its_framework_have_the_same_footprint(json_of: Any) -> None:
    call = ("fits", "llama3-8b", "--cluster", "8xH100-80GB", "--data", "8", "--zero", "3")
    [deepspeed] = json_of(*call, "--for", "deepspeed")["footprints"]
    [priced] = json_of(*call, "--framework", "deepspeed")["footprints"]
    assert deepspeed == priced


def test_the_command_prints_all_choices_as_json(json_of: Any) -> None:
    answer = json_of("fits", "llama3-8b", "--cluster", "8xH100-80GB")
    assert len(answer["footprints"]) == len(footprints(job()))
    assert {row["fits"] for row in answer["footprints"]} == {"yes", "likely", "with recomputation", "no"}
    assert answer["reserve"] == pytest.approx(8 * 2**30)


def test_memory_close_to_the_limit_fits_likely() -> None:
    footprint = footprints(job())[0]
    full = replace(footprint, limit=footprint.kept.total, memory=1.1 * footprint.kept.total)
    assert replace(full, most=1.1).fits == "yes"
    assert replace(full, most=1.2).fits == "likely"


@pytest.mark.parametrize(("limits", "words"), [
    ((1.0, 0.1, 0.1), "Yes: 1 of 3 choices fits as it is; the least"),
    ((1.0, 1.0, 0.1), "Yes: 2 of 3 choices fit as they are; the least"),
    ((1.0, 1.01, 0.1), "Yes: 1 of 3 choices fits as it is and 1 fits with full recomputation; the least"),
])  # fmt: skip
def test_counts_of_fitting_choices_agree_with_their_verb(limits: tuple[float, ...], words: str) -> None:
    footprint = footprints(job())[0]
    sizes = [limit * (footprint.kept if limit == 1 else footprint.recomputed).total for limit in limits]
    choices = [replace(footprint, limit=size, memory=2 * size) for size in sizes]
    console = Console(width=200, file=StringIO(), record=True)
    console.print(render_footprints(choices, reserve=0.0, left_out=0))
    assert console.export_text().startswith(words)


def test_the_table_says_what_fits_and_what_only_json_has(run: Any) -> None:
    code, out, _ = run("fits", "llama3-8b", "--cluster", "8xH100-80GB")
    assert code == 0
    words = " ".join(out.split())
    assert words.startswith("Yes: 24 of 28 choices fit as they are and 3 fit with full recomputation; the least memory")
    assert "recomputing everything" in words
    assert (
        "choices with context or other expert ranks, slices, or tensor ranks over several nodes, are in --json."
        in words
    )


def test_every_choice_has_the_given_micro_batches(json_of: Any) -> None:
    call = ("fits", "llama3-8b", "--cluster", "8xH100-80GB", "--micro-batches", "3")
    open_batch, one_batch = (
        [row["degrees"] for row in json_of(*call, *options)["footprints"]] for options in ((), ("--global-batch", "12"))
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


def test_zero_levels_that_a_framework_refuses_are_omitted() -> None:
    """DeepSpeed steps weights in bf16 under ZeRO alone."""
    asked = replace(job(), options=RunOptions(master_dtype="bf16", framework="deepspeed"), target="deepspeed")
    assert {footprint.degrees.zero for footprint in footprints(asked) if footprint.degrees.pipeline == 1} == {1, 2, 3}


def test_the_python_call_returns_the_same_footprints() -> None:
    asked = job(tensor=4, pipeline=2)
    result = db.fits("llama3-8b", "8xH100-80GB", tensor=4, pipeline=2, sequence_length=4096)
    assert [row.kept for row in result] == [row.kept for row in footprints(asked) if row.degrees.zero == 0]


def test_a_fractional_degree_is_refused() -> None:
    with pytest.raises(db.InputError, match=r"tensor must be a whole number, not 2\.5"):
        db.fits("llama3-8b", "8xH100-80GB", tensor=2.5)


def test_the_shown_expert_degree_needs_the_least_memory() -> None:
    cluster = db.Cluster.parse("8xH100-80GB")
    result = db.fits("mixtral-8x7b", cluster, pipeline=1, tensor=2, zero=1)
    [shown] = common_choices(result, cluster, fixed=["pipeline", "tensor", "zero"])
    assert (shown.degrees.data, shown.degrees.expert) == (4, 4)
    candidates = [f for f in result if replace(f.degrees, expert=4) == shown.degrees]
    assert shown.kept.total == min(f.kept.total for f in candidates)
