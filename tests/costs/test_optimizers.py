"""Memory traffic and operations of an optimizer step, per parameter."""

from __future__ import annotations

from typing import Any

import pytest

from debubble.costs import DEEPSPEED, FSDP, MEGATRON, Cluster, Framework, StepTail, model_units
from debubble.costs.step import HOST_MEMORY_BANDWIDTH, parameter_bytes, step_operations, step_traffic
from debubble.ir import InputError, RunOptions
from debubble.models import models

MODEL = models["llama2-7b"]
LAUNCH, MEMORY = 2e-6, 1e12
CLUSTER = Cluster.from_dict(
    {
        "devices": "4xA100-80GB",
        "memory_bandwidth": MEMORY,
        "flops": 3e14,
        "efficiency": {"memory": 1.0, "matmul": [[1, 0.5]], "launch": LAUNCH},
    }
)


@pytest.mark.parametrize(
    ("optimizer", "bf16", "fp32"),
    [
        ("sgd", 14, 12), ("momentum", 22, 20), ("lion", 22, 20), ("adam", 30, 28), ("adamw", 30, 28),
        ("adamw-8bit", 18, 16), ("muon", 56, 54),
    ],
)  # fmt: skip
def test_every_optimizer_moves_its_states(optimizer: str, bf16: int, fp32: int) -> None:
    moved = {
        dtype: step_traffic(RunOptions(optimizer=optimizer, dtype=dtype), framework=MEGATRON)
        for dtype in ("bf16", "fp16", "fp32")
    }
    assert moved == {"bf16": bf16, "fp16": bf16, "fp32": fp32}
    assert step_traffic(RunOptions(optimizer=optimizer), framework=DEEPSPEED) == bf16 - 2
    assert step_traffic(RunOptions(optimizer=optimizer, dtype="fp32"), framework=DEEPSPEED) == fp32


@pytest.mark.parametrize(
    ("options", "gradient", "optimizer", "traffic"),
    [
        ({}, 4, 12, 30),
        ({"gradient_dtype": "bf16"}, 2, 12, 28),
        ({"moment_dtype": "bf16"}, 4, 8, 22),
        ({"moment_dtype": "bf16", "optimizer": "lion"}, 4, 6, 18),
        ({"gradient_dtype": "bf16", "dtype": "fp32"}, 4, 8, 28),
    ],
)
def test_gradients_and_moments_have_dtypes(
    options: dict[str, str], gradient: int, optimizer: int, traffic: int
) -> None:
    run = RunOptions(**options)  # type: ignore[arg-type]
    sizes = parameter_bytes(run, shards=1, framework=MEGATRON)

    assert (sizes.gradient, sizes.optimizer, step_traffic(run, framework=MEGATRON)) == (gradient, optimizer, traffic)


@pytest.mark.parametrize(
    ("options", "optimizer", "traffic"),
    [({}, 10, 28), ({"moment_dtype": "bf16"}, 6, 20), ({"dtype": "fp16"}, 12, 30), ({"host_optimizer": 1.0}, 0, 30)],
)
def test_master_remainders_are_stored_next_to_bf16(options: dict[str, Any], optimizer: int, traffic: int) -> None:
    run, framework = RunOptions(**options), Framework(keeps_remainders=True)
    sizes = parameter_bytes(run, shards=1, framework=framework)

    assert (sizes.optimizer, step_traffic(run, framework=framework)) == (optimizer, traffic)


@pytest.mark.parametrize(
    ("framework", "masters", "zero", "weight", "optimizer"),
    [
        (MEGATRON, "fp32", 3, 2, 12), (FSDP, "fp32", 2, 2, 12), (FSDP, "fp32", 3, 4, 8), (DEEPSPEED, "fp32", 3, 2, 12),
        (MEGATRON, "bf16", 3, 2, 4), (FSDP, "bf16", 3, 2, 4), (DEEPSPEED, "bf16", 3, 2, 6),
    ],
)  # fmt: skip
def test_a_framework_stores_the_weights_that_it_steps(
    framework: Framework, masters: str, zero: int, weight: int, optimizer: int
) -> None:
    """Torch's FSDP casts in the gather; DeepSpeed keeps a copy of the weights even in bf16."""
    sizes = parameter_bytes(RunOptions(master_dtype=masters, zero=zero), shards=1, framework=framework)
    assert (sizes.weight, sizes.optimizer) == (weight, optimizer)
    assert sizes.gradient == (2 if framework is DEEPSPEED or masters == "bf16" else 4)


def test_a_step_in_full_bf16_moves_16_bits_of_each_state() -> None:
    run = RunOptions(master_dtype="bf16")
    assert step_traffic(run, framework=MEGATRON) == 2 + 2 * (2 + 4)
    assert step_traffic(run, framework=DEEPSPEED) == 2 + 2 * (2 + 4) + 2


def test_an_unknown_moment_dtype_is_refused() -> None:
    with pytest.raises(InputError, match="There is no moment dtype 'fp4'; there are: fp32, bf16, fp16"):
        parameter_bytes(RunOptions(moment_dtype="fp4"), shards=1, framework=MEGATRON)


def test_copies_for_rollback_are_read_and_written() -> None:
    sgd, adam = (
        step_traffic(RunOptions(optimizer=o, post_validation=True), framework=MEGATRON) for o in ("sgd", "adam")
    )
    assert (sgd, adam) == (14 + 2 * 4, 30 + 2 * 12)


def tail(optimizer: str, **options: Any) -> float:
    return StepTail(
        model=MODEL, cluster=CLUSTER, options=RunOptions(optimizer=optimizer, **options), pipeline=4
    ).after()


@pytest.mark.parametrize(("optimizer", "moved"), [("sgd", 14), ("adamw", 30)])
def test_the_tail_is_the_traffic_of_the_optimizer(optimizer: str, moved: int) -> None:
    assert tail(optimizer) == pytest.approx(LAUNCH + moved * MODEL.parameters / 4 / MEMORY)


def test_the_tail_with_gradients_of_two_bytes_moves_less() -> None:
    step_tail = StepTail(model=MODEL, cluster=CLUSTER, options=RunOptions(), pipeline=4, framework=DEEPSPEED)
    assert DEEPSPEED.gradient_bytes == 2
    assert step_tail.after() == pytest.approx(LAUNCH + 28 * MODEL.parameters / 4 / MEMORY)


def test_muon_computes_on_the_matrices_of_the_layers() -> None:
    """Five iterations of 6 m operations per layer parameter, m = 4096, at half of 3e14 per second."""
    assert step_operations(RunOptions(optimizer="muon"), side=4096) == 5 * 6 * 4096
    assert step_operations(RunOptions(), side=4096) == 0
    layers = MODEL.layers * (MODEL.attention_parameters(0) + MODEL.mlp_parameters(0))
    computed = layers / 4 * 5 * 6 * 4096 / 1.5e14
    assert tail("muon") == pytest.approx(LAUNCH + 56 * MODEL.parameters / 4 / MEMORY + computed)


def test_a_unit_takes_its_share_of_the_step() -> None:
    embedding, attention, *_, head = model_units(MODEL, CLUSTER, RunOptions(optimizer="muon")).units
    assert embedding.optimizer_step == pytest.approx(56 * MODEL.embedding_parameters / MEMORY)
    assert head.optimizer_step == pytest.approx(56 * MODEL.head_parameters / MEMORY)
    assert attention.optimizer_step == pytest.approx(
        MODEL.attention_parameters(0) * (56 / MEMORY + 5 * 6 * 4096 / 1.5e14)
    )


@pytest.mark.parametrize(
    ("optimizer", "dtype", "moved"), [("adamw", "bf16", 54), ("sgd", "bf16", 22), ("adamw", "fp32", 52)]
)
def test_the_host_moves_its_states_and_their_copies(optimizer: str, dtype: str, moved: int) -> None:
    unit = model_units(MODEL, CLUSTER, RunOptions(optimizer=optimizer, dtype=dtype)).units[1]
    assert unit.on_host is not None
    assert unit.on_host.step == pytest.approx(moved * MODEL.attention_parameters(0) / HOST_MEMORY_BANDWIDTH)
