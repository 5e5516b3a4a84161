"""Costs specific to torch and DeepSpeed: FSDP2, checkpoints, losses, gradients, rings and messages."""

from dataclasses import replace

import pytest

from debubble.costs import Cluster, model_units
from debubble.costs.frameworks import TORCH, Framework, named_framework
from debubble.costs.units import Units
from debubble.ir import RunOptions
from debubble.models import models

MODEL = models["llama3-8b"]
CLUSTER = Cluster.parse("8xH100-80GB")
OPTIONS = RunOptions(sequence_length=4096, data=8, zero=3)


def units(framework: Framework, *, micro_batches: int | None = None, data: int = 8) -> Units:
    """The units of Llama-3 8B on one device per replica."""
    options = replace(OPTIONS, data=data, zero=3 if data > 1 else 0)
    return model_units(
        MODEL, CLUSTER, options, pipeline=1, framework=framework, micro_batches=micro_batches
    )  # fmt: skip


def test_recomputation_stops_before_the_last_product_of_a_layer() -> None:
    complete, stopping = units(TORCH), units(replace(TORCH, stops_recomputing=True))
    for before, after in zip(complete.units, stopping.units, strict=True):
        full, shorter = before.strategies.get("full"), after.strategies.get("full")
        if before.type != "mlp":
            assert full == shorter
            continue
        assert full is not None
        assert shorter is not None
        # The down-projection is a third of the MLP's products.
        assert 0.6 < float(shorter.recompute) / float(full.recompute) < 0.72
        assert shorter.activation == full.activation


def test_fsdp2_copies_what_it_gathers_and_scatters() -> None:
    views, copies = (units(replace(TORCH, copies_gathered=copied)) for copied in (False, True))
    parameters = MODEL.attention_parameters(0)
    traffic = Cluster.parse("8xH100-80GB").slowest
    bandwidth = traffic.memory_bandwidth * traffic.efficiency.memory
    before, after = views.units[1], copies.units[1]
    launch = traffic.efficiency.launch
    assert after.forward - before.forward == pytest.approx(launch + 4 * parameters / bandwidth)
    assert after.backward_weight - before.backward_weight == pytest.approx(
        2 * launch + (4 + 2 + 4) * parameters / bandwidth
    )


def test_a_single_device_copies_nothing() -> None:
    assert units(replace(TORCH, copies_gathered=True), data=1) == units(TORCH, data=1)


def test_a_narrow_loss_keeps_8_bytes_per_logit() -> None:
    wide = units(replace(TORCH, fused_loss=False)).units[-1].activation
    narrow = units(replace(TORCH, fused_loss=False, narrow_loss=True)).units[-1].activation
    assert wide - narrow == (14 - 8) * 4096 * MODEL.vocab


def test_one_micro_batch_has_logits_before_any_gradients() -> None:
    framework = replace(TORCH, fused_loss=False, frees_gradients=True)
    several, one = units(framework, micro_batches=2), units(framework, micro_batches=1)
    gradients = sum(unit.states.gradients for unit in several.units[:-1] if unit.states is not None)
    assert several.units[-1].activation - one.units[-1].activation == pytest.approx(gradients)
    assert several.units[:-1] == one.units[:-1]


def test_torch_gathers_keys_and_values_in_the_first_hop() -> None:
    def core(framework: Framework, network: float) -> tuple[float, float]:
        cluster = Cluster.from_dict({"devices": "16xH100-80GB", "network_bandwidth": network})
        options = RunOptions(sequence_length=65536, tensor=8, context=2)
        unit = model_units(MODEL, cluster, options, pipeline=1, framework=framework).units[1]
        return float(unit.attention_forward), float(unit.attention_backward)

    ring, torch = TORCH, replace(TORCH, merges_rings=True)
    fast, slow = core(torch, 50e9), core(torch, 5e9)
    assert all(theirs > ours for theirs, ours in zip(fast, core(ring, 50e9), strict=True))
    # A device has keys and values of 4 query heads; those of half of the tokens leave the node.
    gathered = 2 * 65536 * 2 * 4 * 128 / 2
    waited = gathered / (5e9 * 0.7) - core(ring, 5e9)[0] / 2
    assert slow[0] - fast[0] == pytest.approx(waited, rel=0.1)


def test_deepspeed_pipelines_block_on_messages() -> None:
    deepspeed = named_framework("megatron-deepspeed@2021")
    assert units(deepspeed).communication_model == "blocking"
    assert units(TORCH).communication_model == "latency"
