from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import RunOptions
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.space import ZERO_LEVELS, Job, configurations, ordinary_choices

LLAMA, MIXTRAL = db.models["llama3-8b"], db.models["mixtral-8x7b"]


def job(devices: int = 8, batch: int = 16, *, model: db.Model = LLAMA, **fixed: int) -> Job:
    return Job(
        model=model, cluster=db.Cluster.parse(f"{devices}xH100-80GB"), global_batch=batch, fixed=fixed,
        options=RunOptions(sequence_length=4096),
    )  # fmt: skip


@settings(max_examples=30)
@given(st.integers(1, 16), st.integers(1, 24))
def test_every_choice_uses_all_devices_and_the_full_batch(devices: int, batch: int) -> None:
    choices = configurations(job(devices, batch))
    assert len(set(choices)) == len(choices)
    assert {choice.devices for choice in choices} == {devices}
    assert {choice.global_batch for choice in choices} == {batch}


def test_data_parallelism_without_a_pipeline_is_a_choice() -> None:
    assert Degrees(data=8, zero=1, micro_batch_size=2) in configurations(job())


def test_fixed_degrees_are_kept() -> None:
    choices = configurations(job(tensor=2, zero=0, micro_batch_size=1))
    assert {(c.tensor, c.zero, c.micro_batch_size) for c in choices} == {(2, 0, 1)}
    assert {c.pipeline for c in choices} == {1, 2, 4}


def test_experts_are_divided_over_data_and_context_ranks() -> None:
    choices = configurations(job(model=MIXTRAL))
    assert {c.expert for c in choices} == {1, 2, 4, 8}
    assert all((c.data * c.context) % c.expert == 0 for c in choices if c.expert_tensor is None)


def test_undivided_experts_are_placed_on_tensor_ranks_too() -> None:
    undivided = [c for c in configurations(job(model=MIXTRAL)) if c.expert_tensor == 1]
    assert all(c.tensor > 1 and (c.tensor * c.data * c.context) % c.expert == 0 for c in undivided)
    assert any(c.expert > c.data * c.context for c in undivided)


QWEN_VL = db.Model.from_hf(
    {
        "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "vision_config": {"depth": 32},
    }
)  # fmt: skip


@pytest.mark.parametrize("model", [QWEN_VL, db.models["llama4-scout"]], ids=["dense", "experts"])
def test_tensor_parallel_ranks_divide_a_vision_tower_too(model: db.Model) -> None:
    assert model.vision is not None
    choices = configurations(job(batch=8, model=model, pipeline=1, zero=1, context=1, micro_batch_size=1))
    assert {model.vision.tower.ffn % choice.tensor for choice in choices} == {0}
    assert all(job(batch=8, model=model).problem(choice).units.units for choice in choices)


def test_the_layers_of_a_vision_tower_fill_stages_too() -> None:
    assert any(choice.pipeline == 16 for choice in configurations(job(16, model=QWEN_VL, tensor=1)))


def test_micro_batch_sizes_divide_the_batch_of_a_replica() -> None:
    choices = configurations(job(batch=6 * 8, tensor=1, context=1, pipeline=1, zero=1))
    assert {c.micro_batch_size for c in choices} == {1, 2, 3, 6}
    assert {c.expert for c in configurations(job())} == {1}


@pytest.mark.parametrize(
    ("fixed", "sentence"),
    [
        ({"tensor": 3}, "--tensor 3 cannot divide 8 devices: give degrees whose product divides 8."),
        ({"data": 16}, "--data 16 cannot divide 8 devices"),
        ({"micro_batches": 5}, "with --micro-batches 5"),
        ({"tensor": 0}, "--tensor must be at least 1, not 0"),
        ({"zero": 4}, "ZeRO has the levels 0, 1, 2 and 3, not 4"),
        ({"pipeline": 8, "chunks": 20}, "66 model units cannot fill 160 stages"),
    ],
)
def test_fixed_degrees_that_fit_nothing_are_refused(fixed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(db.InputError, match=sentence):
        configurations(job(**fixed))


def test_choices_with_too_many_micro_batches_are_omitted() -> None:
    choices = configurations(job(1, 2**20, pipeline=1))
    assert min(choice.micro_batch_size for choice in choices) == 2
    with pytest.raises(db.InputError, match="999999937 pairs of stage and micro-batch are more than the 524288"):
        configurations(job(1, 999_999_937, micro_batch_size=1))


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(db.InputError, match="at least one sequence, not 0"):
        job(batch=0)


@pytest.mark.parametrize(("dtype", "lora"), [("bf16", 0), ("fp32", 16)])
def test_zero_1_is_never_slower_or_larger_than_zero_0(dtype: str, lora: int) -> None:
    assert 0 not in ZERO_LEVELS
    asked = Job(
        model=LLAMA, cluster=db.Cluster.parse("16xH100-80GB"), global_batch=16,
        options=RunOptions(dtype=dtype, lora=lora),
    )  # fmt: skip
    for data in (2, 16):
        none, first = (
            asked.problem(Degrees(data=data, pipeline=16 // data, zero=zero, micro_batches=16 // data))
            for zero in (0, 1)
        )
        assert none.tail is not None
        assert first.tail is not None
        pairs = list(zip(none.units.units, first.units.units, strict=True))
        assert all(a.work == b.work and a.static >= b.static for a, b in pairs)
        assert none.tail.after() >= first.tail.after()


def test_ordinary_choices_divide_tensors_within_a_node() -> None:
    job = Job(model=db.models["llama3-8b"], cluster=db.Cluster.parse("16xA100-80GB"), global_batch=64)
    ordinary = [*ordinary_choices(job)]
    assert {*ordinary} <= {*configurations(job)}
    assert {degrees.tensor for degrees in ordinary} == {1, 2, 4, 8}
    assert {(degrees.context, degrees.micro_batch_size) for degrees in ordinary} == {(1, 1)}


def test_ordinary_choices_keep_fixed_degrees() -> None:
    job = Job(
        model=db.models["llama3-8b"], cluster=db.Cluster.parse("8xA100-80GB"), global_batch=16,
        fixed={"tensor": 2, "micro_batch_size": 4},
    )  # fmt: skip
    assert {(degrees.tensor, degrees.micro_batch_size) for degrees in ordinary_choices(job)} == {(2, 4)}


def test_chunks_of_data_parallel_ranks_are_called_stages() -> None:
    assert str(Degrees(data=8, zero=3, micro_batches=4, chunks=16)) == (
        "data 8, ZeRO-3, 4 micro-batches of 1, layers in 16 stages on each device"
    )
