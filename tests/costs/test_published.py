"""Published measurements, and the errors of the cost model that docs/costs.md states."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from debubble.costs import DEEPSPEED, MEGATRON, Cluster, Framework, StepTail, model_units
from debubble.costs.partition import Partition
from debubble.ir import Placement, RunOptions
from debubble.models import Model
from debubble.schedules import schedules
from debubble.simulator import Timeline, simulate

GIB = 2**30


HOPPER_OF_2023: dict[str, Any] = {
    "matmul": [[128, 0.17], [256, 0.31], [512, 0.46], [1024, 0.56], [2048, 0.60], [4096, 0.62]],
    "attention": [[16384, 0.18], [32768, 0.28], [65536, 0.36], [131072, 0.40], [262144, 0.42]],
    "attention_backward": [[16384, 0.20], [32768, 0.25], [65536, 0.30], [131072, 0.32], [262144, 0.34]],
}
"""Efficiencies of cuBLAS and FlashAttention 2 in 2023, fitted to the 41 runs of Megatron-Kwai on H800."""


def of_2023(devices: str) -> Cluster:
    return Cluster.from_dict({"devices": devices, "efficiency": HOPPER_OF_2023 if "H800" in devices else {}})


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Model:
    return Model.from_hf(
        {
            "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
        }
    )  # fmt: skip


def gpt(layers: int, hidden: int, heads: int) -> Model:
    config = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048, "vocab_size": 51200}
    return Model.from_hf({"model_type": "gpt2", **config})


def run(
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    *,
    micro_batches: int,
    pipeline: int = 1,
    chunks: int = 1,
    recompute: str = "none",
    framework: Framework = MEGATRON,
) -> tuple[Timeline, float]:
    """The timeline with equal layers per stage, and the time of the full step."""
    units = replace(model_units(model, cluster, options, pipeline=pipeline, framework=framework), memory_limit=None)
    stages, inner = pipeline * chunks, len(units.units) - 2
    bounds = [0, *(1 + s * inner // stages for s in range(1, stages)), len(units.units)]
    lengths = [end - first for first, end in pairwise(bounds)]
    partition = Partition.cut(units, lengths, strategy=recompute)
    costs = units.stage_costs(partition, Placement.looped(pipeline, chunks))
    name = "1f1b" if chunks == 1 else "interleaved"
    schedule = schedules[name](devices=pipeline, micro_batches=micro_batches, chunks=chunks, costs=costs)
    timeline = simulate(replace(schedule, fused_recompute=partition.recomputing), costs)
    tail = StepTail(model=model, cluster=cluster, options=options, pipeline=pipeline, framework=framework).after()
    return timeline, float(timeline.makespan) + tail


LLAMA3_70B_12 = llama(12, 8192, 64, 8, 28672, 128256)
LLAMA3_405B_4 = llama(4, 16384, 128, 8, 53248, 128256)


@pytest.mark.parametrize(
    ("model", "tensor", "context", "data", "pipeline", "sequence", "measured"),
    [
        (LLAMA3_70B_12, 1, 1, 4, 2, 4096, [66.55, 62.97]),
        (LLAMA3_405B_4, 1, 1, 4, 2, 4096, [86.61, 87.08]),
        (LLAMA3_405B_4, 8, 1, 1, 1, 4096, [38.57]),
        (LLAMA3_70B_12, 1, 8, 1, 1, 131072, [147.99]),
        (LLAMA3_405B_4, 2, 4, 1, 1, 32768, [87.03]),
    ],
)
def test_peaks_of_megatron_on_b200_are_within_1_5_percent(
    model: Model, tensor: int, context: int, data: int, pipeline: int, sequence: int, measured: list[float]
) -> None:
    """SimuMax, B200 release 1.2: peak GiB allocated, per pipeline rank."""
    options = RunOptions(sequence_length=sequence, tensor=tensor, context=context, data=data, zero=1)
    timeline, _ = run(model, Cluster.parse("8xB200-192GB"), options, micro_batches=4, pipeline=pipeline)

    assert [float(p) / GIB for p in timeline.peak_memory] == pytest.approx(measured, rel=0.015)


def test_the_peak_of_megatron_kwai_on_h800_is_within_1_percent() -> None:
    """Artifact of Yuan et al., ATC'24, Figure 7: Llama-65B, 8192 tokens, norms and activation function recomputed."""
    options = RunOptions(sequence_length=8192, tensor=2, context=2, data=8, zero=1)
    timeline, _ = run(
        llama(80, 8192, 64, 64, 22016, 32004), of_2023("256xH800-80GB"), options,
        micro_batches=32, pipeline=8, chunks=5, recompute="cmb", framework=replace(DEEPSPEED, gradient_bytes=4),
    )  # fmt: skip

    assert max(map(float, timeline.peak_memory)) == pytest.approx(65_330_982_400, rel=0.01)


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward", "backward"),
    [
        (False, "none", 7.7, 11.9),
        (True, "none", 7.2, 11.8),
        (False, "full", 7.7, 19.5),
        (False, "core", 7.7, 13.2),
        (True, "core", 7.2, 13.1),
    ],
)
def test_layer_times_of_the_22b_model_are_within_6_percent(
    sequence_parallel: bool, recompute: str, forward: float, backward: float
) -> None:
    """Korthikanti et al. 2022, Table 4, in milliseconds (to which the A100's matrix products were fitted)."""
    framework = replace(MEGATRON, flash=False, sequence_parallel=sequence_parallel)
    options = RunOptions(micro_batch_size=4, sequence_length=2048, tensor=8)
    halves = model_units(gpt(48, 6144, 64), Cluster.parse("8xA100-80GB"), options, framework=framework).units[1:3]
    recompute_time = sum(u.strategies.get(recompute, u.strategies["none"]).recompute for u in halves)

    assert 1e3 * sum(u.forward for u in halves) == pytest.approx(forward, rel=0.06)
    assert 1e3 * (sum(u.backward_input + u.backward_weight for u in halves) + recompute_time) == pytest.approx(
        backward, rel=0.06
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "tensor", "pipeline", "gpus", "batch", "teraflops"),
    [
        (48, 8192, 64, 8, 2, 512, 1536, 138),
        (60, 10240, 80, 8, 4, 1024, 1792, 140),
        (80, 12288, 96, 8, 8, 1536, 2304, 148),
        (96, 16384, 128, 8, 16, 1920, 2160, 155),
    ],
)
def test_steps_of_narayanan_et_al_on_a100_are_within_5_percent(
    layers: int, hidden: int, heads: int, tensor: int, pipeline: int, gpus: int, batch: int, teraflops: float
) -> None:
    """Narayanan et al., SC'21, Table 1: full recomputation, which their rate counts."""
    s, v = 2048, 51200
    operations = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + v / (16 * layers * hidden))
    data = gpus // (tensor * pipeline)
    _, step = run(
        gpt(layers, hidden, heads), Cluster.parse(f"{gpus}xA100-80GB"),
        RunOptions(sequence_length=s, tensor=tensor, data=data), micro_batches=batch // data, pipeline=pipeline,
        recompute="full", framework=replace(MEGATRON, flash=False, sequence_parallel=False),
    )  # fmt: skip

    assert step == pytest.approx(operations / (gpus * teraflops * 1e12), rel=0.05)


@pytest.mark.parametrize(
    ("hardware", "recompute", "tokens_per_second"),
    [("A800-80GB", "full", 3016), ("H800-80GB", "full", 6639), ("A800-80GB", "cmb", 3803), ("H800-80GB", "cmb", 8273)],
)
def test_steps_of_llama_7b_at_12k_tokens_are_within_6_percent(
    hardware: str, recompute: str, tokens_per_second: float
) -> None:
    """Megatron-Kwai's minimum demo: 4 devices, 16 sequences, 8 chunks; `cmb` offloads a tenth of the activations."""
    _, step = run(
        llama(32, 4096, 32, 32, 11008, 32004), of_2023(f"4x{hardware}"),
        RunOptions(sequence_length=12288, zero=1), micro_batches=16, pipeline=4, chunks=8, recompute=recompute,
        framework=replace(DEEPSPEED, gradient_bytes=4),
    )  # fmt: skip

    assert step == pytest.approx(16 * 12288 / (4 * tokens_per_second), rel=0.06)
