"""Traits of frameworks by name and version: fusion, overlap, saved tensors and CUDA graphs."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from debubble.costs import DEEPSPEED, FSDP, MEGATRON, TORCH, Cluster, Framework, StepTail, Units, model_units
from debubble.costs.devices.known_hardware import HOST_CALL, hardware
from debubble.costs.devices.speed import Speed
from debubble.costs.frameworks import FRAMEWORKS, framework_of_options, framework_with, named_framework
from debubble.ir import InputError, RunOptions
from debubble.models import models

H100, BLACKWELL = Cluster.parse("8xH100-80GB"), Cluster.parse("8xB200-192GB")
OPTIONS = RunOptions(tensor=8)


def units(framework: Framework, *, model: str = "llama3-8b", options: RunOptions = OPTIONS) -> Units:
    return model_units(models[model], H100, options, framework=framework)


def test_a_version_resolves_to_the_latest_one_up_to_it() -> None:
    assert named_framework("torchtitan@2024.11") == FRAMEWORKS["torchtitan"]["2024.06"]


def test_a_version_before_the_first_resolves_to_the_first() -> None:
    assert named_framework("torchtitan@2020.1") == FRAMEWORKS["torchtitan"]["2024.06"]


def test_a_name_without_a_version_resolves_to_the_newest() -> None:
    assert named_framework("torchtitan") == FRAMEWORKS["torchtitan"]["2025.10"]


def test_traits_in_the_text_override_those_of_the_framework() -> None:
    changed = named_framework("nemo@24.09,graphs=step,gradient_bytes=4,tensor_overlap=false")

    assert changed == replace(named_framework("nemo"), graphs="step", gradient_bytes=4, tensor_overlap=False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("megatron", "There is no framework 'megatron'; did you mean megatron-lm?"),
        ("nemo@new", "'new' is no version of nemo; write it as numbers"),
        ("nemo,overlap=true", "A framework has no trait 'overlap'"),
        ("nemo,graphs=all", "graphs is 'all'; it must be one of: none, layers, step."),
        ("nemo,flash=yes", "flash is 'yes'; it must be one of: true, false."),
        ("nemo,gradient_bytes=two", "gradient_bytes is 'two'; it must be a number of bytes."),
    ],
)
def test_invalid_frameworks_and_traits_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence.replace(".", "[.]")):
        named_framework(text)


@pytest.mark.parametrize("name", ["megatron-lm", "torchtitan", "automodel", "deepspeed"])
def test_zero_3_of_frameworks_gathers_a_unit_at_a_time(name: str) -> None:
    assert named_framework(name).gathers_units


def test_traits_apply_to_the_framework_of_the_target() -> None:
    assert framework_of_options("target,flash=false", FSDP) == replace(FSDP, flash=False)
    assert framework_of_options("", DEEPSPEED) == DEEPSPEED


def test_traits_are_written_as_the_option_takes_them() -> None:
    assert framework_with("nemo", flash=False, graphs=None, gradient_bytes=2) == "nemo,flash=false,gradient_bytes=2"
    assert framework_with("nemo", flash=None) == "nemo"


def test_units_have_the_framework_of_the_options() -> None:
    named = model_units(models["llama3-8b"], H100, replace(OPTIONS, framework="torchtitan@2024.06"))

    assert named == units(named_framework("torchtitan@2024.06"))


def test_host_calls_bound_small_units_without_graphs() -> None:
    attention = units(replace(MEGATRON, graphs="none")).units[1]

    assert attention.forward == pytest.approx(8 * HOST_CALL)
    assert attention.backward_input + attention.backward_weight == pytest.approx(8 * HOST_CALL)


def test_experts_are_not_in_a_graph_of_layers() -> None:
    options = RunOptions(data=8, expert=8)
    mlp = units(replace(MEGATRON, graphs="layers"), model="qwen3-30b-a3b", options=options).units[2]

    assert mlp.forward == pytest.approx(19 * HOST_CALL)


def test_a_graph_of_the_step_launches_kernels_faster() -> None:
    assert Speed.from_hardware(hardware["H100-80GB"], "bf16", replace(MEGATRON, graphs="step")).launch == 3e-6


def test_inputs_of_fp8_products_are_saved_in_8_bits() -> None:
    options = RunOptions(dtype="fp8")
    wide, narrow = (units(replace(MEGATRON, keeps_8_bits=saves), options=options).units[2] for saves in (False, True))

    assert wide.activation - narrow.activation == 4096 * (4096 + 14336)


def test_attention_saves_its_output_in_16_bits_for_fp8() -> None:
    options = RunOptions(dtype="fp8")
    wide, narrow = (units(replace(MEGATRON, keeps_8_bits=saves), options=options).units[1] for saves in (False, True))

    assert narrow.activation == wide.activation


def test_adapters_on_projections_save_nothing_in_the_mlp() -> None:
    options = RunOptions(lora=16)
    everywhere, some = (units(replace(MEGATRON, adapted=where), options=options).units[2] for where in ("all", "qkv"))

    assert everywhere.activation - some.activation > 2 * 4096 * (4096 + 14336)
    assert some.backward_weight == 0


def test_sequential_experts_launch_more_kernels() -> None:
    options = RunOptions(data=8, expert=8)
    grouped_mlp, sequential = (
        units(replace(MEGATRON, grouped_experts=grouped), model="qwen3-30b-a3b", options=options).units[2]
        for grouped in (True, False)
    )

    assert sequential.forward - grouped_mlp.forward == pytest.approx(2 * 15 * 15e-6)


def test_the_loss_of_torch_keeps_14_bytes_per_logit() -> None:
    fused, eager = (units(replace(MEGATRON, fused_loss=loss)).units[-1] for loss in (True, False))

    assert eager.activation - fused.activation == pytest.approx(10 * 4096 * 128256 / 8)


def test_a_loss_of_gathered_logits_keeps_them_on_every_rank() -> None:
    options = RunOptions(tensor=4)
    divided, gathered = (
        units(replace(MEGATRON, loss_parallel=parallel), options=options).units[-1] for parallel in (True, False)
    )
    assert gathered.activation - divided.activation == pytest.approx(4 * 4096 * 128256 * 3 / 4)
    assert gathered.forward > divided.forward


def test_elementwise_operators_without_compilation_are_slower() -> None:
    assert units(replace(MEGATRON, compiled=False)).units[1].forward > units(MEGATRON).units[1].forward


def test_buckets_take_memory_on_every_device() -> None:
    plain, bucketed = (units(replace(MEGATRON, bucket_bytes=size)).units for size in (0, 1000))

    assert [unit.workspace + 1000 for unit in plain] == [unit.workspace for unit in bucketed]


def test_flash_attention_2_is_slower_on_hopper() -> None:
    speed = Speed.from_hardware(hardware["H100-80GB"], "bf16", replace(MEGATRON, attention="flash-2"))
    newest = Speed.from_hardware(hardware["H100-80GB"], "bf16")

    assert speed.attention(1e12, rows=1e6) - 15e-6 == pytest.approx((newest.attention(1e12, rows=1e6) - 15e-6) / 0.55)


def test_narrow_heads_are_slower() -> None:
    speed = Speed.from_hardware(hardware["H100-80GB"], "bf16")
    wide, narrow = (speed.attention(1e12, rows=1e6, width=width) - 15e-6 for width in (128, 64))

    assert narrow == pytest.approx(wide * 2**0.6)


@pytest.mark.parametrize(("dtype", "share", "peak"), [("fp8", 1.2, 4500e12), ("mxfp8", 1.14, 4500e12)])
def test_products_in_8_bits_reach_their_efficiency(dtype: str, share: float, peak: float) -> None:
    speed = Speed.from_hardware(BLACKWELL.slowest, dtype)

    assert speed.linear(8192, 8192, 8192) - 15e-6 == pytest.approx(2 * 8192**3 / (peak * share * 0.45))


def test_four_bits_need_hardware_that_has_them() -> None:
    with pytest.raises(InputError, match="H100-80GB has no nvfp4: give --dtype bf16, or fp4_flops in a cluster file"):
        Speed.from_hardware(hardware["H100-80GB"], "nvfp4")


def test_less_power_lowers_the_clock_by_its_cube_root() -> None:
    limited = Cluster.from_dict({"devices": "8xH100-80GB", "power": 700 / 8}).slowest.efficiency

    assert limited.matmul[-1][1] == pytest.approx(0.66 / 2)
    assert limited.memory == 0.8


def test_power_is_refused_for_a_device_of_unknown_power() -> None:
    with pytest.raises(InputError, match="power is given for L40S-48GB, whose own is not known"):
        Cluster.from_dict({"devices": "8xL40S", "power": 300})


def test_an_fp8_efficiency_may_be_above_one() -> None:
    assert Cluster.from_dict({"devices": "8xB200", "efficiency": {"fp8": 1.5}}).slowest.efficiency.fp8 == 1.5


def test_overlapped_gradients_take_no_time_after_the_pipeline() -> None:
    options = RunOptions(data=8, zero=1)
    plain, hidden = (
        StepTail(model=models["llama3-8b"], cluster=H100, options=options, framework=framework)
        for framework in (MEGATRON, replace(MEGATRON, gradient_overlap=True))
    )

    assert hidden.after() < 0.1 * plain.after()


def test_a_gather_without_overlap_takes_its_time() -> None:
    options = RunOptions(data=8, zero=1)
    frameworks = (
        MEGATRON,
        replace(MEGATRON, gradient_overlap=True, gather_overlap=False),
        replace(MEGATRON, gradient_overlap=True),
    )
    none, reduced, both = (
        StepTail(model=models["llama3-8b"], cluster=H100, options=options, framework=framework).after()
        for framework in frameworks
    )

    # A ring moves gradients in 4 bytes and parameters in 2.
    assert (reduced - both) / (none - both) == pytest.approx(1 / 3, rel=0.01)


def test_expert_gradients_are_reduced_over_the_network() -> None:
    cluster = Cluster.parse("64xH100-80GB")
    within, across = (
        StepTail(model=models["qwen3-30b-a3b"], cluster=cluster, options=RunOptions(data=64, expert=expert, zero=1))
        for expert in (1, 8)
    )

    assert across.after() > 0.2 * within.after()


def test_torch_has_receive_buffers_for_every_micro_batch() -> None:
    options = RunOptions(sequence_length=4096, data=2)
    plain, torch = (
        model_units(models["llama3-8b"], H100, options, framework=framework, micro_batches=16)
        for framework in (FSDP, TORCH)
    )
    message = 2 * 4096 * 4096

    assert plain.receive_buffers == 0
    assert torch.receive_buffers == 16 * message
    assert [torch.buffers((stage,), 4) for stage in range(4)] == [
        16 * message,
        32 * message,
        32 * message,
        16 * message,
    ]
    assert torch.buffers((0, 4), 8) == 3 * 16 * message


def test_kept_outputs_are_logits_of_all_but_one_micro_batch() -> None:
    options = RunOptions(sequence_length=4096, data=2)
    units = model_units(
        models["llama3-8b"], H100, options, framework=named_framework("automodel"), micro_batches=16
    )  # fmt: skip

    assert units.kept_outputs == 15 * 2 * 4096 * 128256
    assert units.buffers((3,), 4) == units.receive_buffers + units.kept_outputs


def test_a_single_device_has_no_receive_buffers() -> None:
    options = RunOptions(data=8)

    assert model_units(models["llama3-8b"], H100, options, framework=TORCH, micro_batches=16).receive_buffers == 0


def test_torchtitan_returns_no_outputs_from_october_2025() -> None:
    assert named_framework("torchtitan@2025.06").keeps_outputs
    assert not named_framework("torchtitan").keeps_outputs


def test_docs_of_costs_list_every_trait() -> None:
    page = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()

    assert [trait.name for trait in fields(Framework) if f"`{trait.name}`" not in page] == []
