"""Costs of a model's units: bytes by published formulas, and consistent times."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.costs import EAGER, MEGATRON, Cluster, Framework, Unit, Units, model_units
from debubble.costs.analytical.half_layers import fused_core
from debubble.costs.analytical.operators import Shapes
from debubble.costs.analytical.parameter_costs import OVERLAP_SLOWDOWN, OVERLAP_TRAFFIC
from debubble.costs.devices.speed import Speed
from debubble.costs.frameworks import FSDP
from debubble.costs.partition import Partition
from debubble.ir import InputError, Placement, RunOptions
from debubble.ir.stage_costs import OVERLAPS
from debubble.models import ModelConfig, models
from debubble.models.architecture import Experts, Mlp
from debubble.models.mixers import Attention
from debubble.models.quantization import FORMATS, quantized_bytes

A100S = Cluster.parse("64xA100-80GB")
LLAMA = models["llama3-8b"]
GPT3 = models["gpt3-175b"]
S = 2048
SCORES = replace(MEGATRON, flash=False)


def layer(units: Units) -> tuple[Unit, Unit]:
    return units.units[1], units.units[2]


def layer_bytes(units: Units, strategy: str = "none") -> float:
    """Activation bytes of one layer."""
    halves = (u.strategies.get(strategy, u.strategies["none"]).activation for u in layer(units))
    return float(sum(halves))


def test_units_are_embedding_half_layers_and_head() -> None:
    units = model_units(LLAMA, A100S).units

    assert [u.type for u in units[:4]] == ["embedding", "attention", "mlp", "attention"]
    assert [u.layer for u in units[:4]] == [None, 0, 0, 1]
    assert (units[-1].type, len(units)) == ("head", 2 * LLAMA.layers + 2)


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 2)])
def test_a_gated_layer_saves_12h_4kv_6ffn_bytes_per_token(tensor: int, context: int) -> None:
    m = LLAMA
    units = model_units(m, A100S, RunOptions(sequence_length=S, tensor=tensor, context=context))
    log_sum_exp = 4 * m.heads
    per_token = 12 * m.hidden + 4 * m.kv_width + 6 * m.ffn + log_sum_exp

    assert layer_bytes(units) == S * per_token / (tensor * context)
    assert layer_bytes(units, "cmb") == S * (per_token - 4 * m.hidden - 2 * m.ffn) / (tensor * context)


@pytest.mark.parametrize(("cap", "window", "together"), [(50.0, None, sum), (None, S // 2, sum), (None, None, max)])
def test_context_ranks_gather_first_or_overlap_a_ring(cap: float | None, window: int | None, together: Any) -> None:
    mixer = Attention(window=window)
    model = replace(LLAMA, attention_cap=cap)
    options = RunOptions(sequence_length=S, context=2)
    speed = Speed.from_hardware(A100S.slowest, "bf16")
    rows = S / 2 * model.heads
    flops = 4 * S / 2 * mixer.keys_per_token(S) * model.attention_width
    computing = speed.attention(flops, rows=rows), speed.attention(2.5 * flops, rows=rows, backward=True)
    exchange = speed.gather(2 * S * 2 * model.kv_width, 2, alongside=2)

    [core] = fused_core(Shapes(model=model, options=options, framework=MEGATRON, speed=speed), mixer)

    assert core.forward == pytest.approx(together((computing[0], exchange)), rel=1e-12)
    assert core.backward_input == pytest.approx(together((computing[1], 2 * exchange)), rel=1e-12)


@pytest.mark.parametrize("family", ["llama3-8b", "gpt3-13b"])
def test_only_adapters_have_gradients_and_optimizer_states(family: str) -> None:
    """The adapters of rank r of W [out, in] are A [r, in] and B [out, r]."""
    m, r = models[family], 16
    h, q, kv, ffn = m.hidden, m.attention_width, m.kv_width, m.ffn
    units = model_units(m, A100S, RunOptions(sequence_length=S, lora=r)).units
    ins, outs = (h, q + 2 * kv) if m.positions else (3 * h, q + 2 * kv)
    adapters = r * (ins + outs + q + h)
    mlp = r * m.matrices * (h + ffn)

    assert units[0].static == 2 * m.embedding_parameters
    assert units[1].static == 2 * m.attention_parameters(0) + 18 * adapters
    assert units[2].static == 2 * m.mlp_parameters(0) + 18 * mlp
    assert units[-1].static == 2 * m.head_parameters
    assert m.trained_parameters(r) == m.layers * (adapters + mlp)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["llama3-8b", "gpt3-13b"])
def test_quantized_weights_take_less_memory_and_more_time(family: str, format: str) -> None:
    m = models[family]
    plain, small = (
        model_units(m, A100S, RunOptions(sequence_length=S, lora=16, quantize=q)).units for q in (None, format)
    )
    largest, expanded = m.hidden * m.ffn, {"nf4": 4 + 2, "nf4-dq": 4 + 2 + 4 / 64}[format]
    for matrices, a, b in zip((m.attention_matrices(0), m.mlp_matrices(0)), plain[1:3], small[1:3], strict=True):
        expected = sum(2 * weights - quantized_bytes(format, weights) for weights in matrices)
        assert a.static - b.static == pytest.approx(expected, rel=1e-12)
        assert b.workspace - a.workspace == expanded * largest
        assert b.forward > a.forward
        assert b.backward_input > a.backward_input
        assert b.backward_weight == a.backward_weight
        assert b.activation == a.activation
    assert [small[end].static for end in (0, -1)] == [plain[end].static for end in (0, -1)]
    assert sum(m.attention_matrices(0)) == m.attention_parameters(0) - biases_and_norms(m)


def test_double_quantization_takes_its_published_bits() -> None:
    """Dettmers et al., QLoRA, section 3: 8 / 64 + 32 / (64 x 256) bits, and one mean per tensor."""
    assert quantized_bytes("nf4", 4096 * 4096) == 4096 * 4096 * (4 + 32 / 64) / 8
    assert quantized_bytes("nf4-dq", 4096 * 4096) == 4096 * 4096 * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + 4
    assert quantized_bytes("nf4-dq", 64 * 257) == 32 * 257 + 257 + 2 * 4 + 4


def biases_and_norms(m: Any) -> int:
    biases = m.qkv_bias * (m.attention_width + 2 * m.kv_width) + m.output_bias * m.hidden
    return int(biases + m.half_layer_norms * m.norm_parameters)


def test_the_weights_backward_of_frozen_layers_takes_nothing() -> None:
    full, lora = (model_units(LLAMA, A100S, RunOptions(sequence_length=S, lora=r)).units for r in (0, 16))

    assert lora[0].backward_weight == lora[-1].backward_weight == 0
    for a, b in zip(full[1:3], lora[1:3], strict=True):
        assert b.forward > a.forward
        assert b.backward_input > a.backward_input
        assert b.backward_weight < a.backward_weight
        assert b.activation > a.activation


def test_a_mixtures_experts_are_frozen_without_adapters() -> None:
    m = models["mixtral-8x7b"]
    full, lora = (model_units(m, A100S, RunOptions(sequence_length=S, lora=r)).units[2] for r in (0, 16))

    assert lora.static == 2 * m.mlp_parameters(0)
    assert lora.backward_weight == 0
    assert lora.activation == full.activation


def test_windows_limit_the_keys_of_attention() -> None:
    """A token attends to half of a full sequence on average, and at most to a window."""
    config = {**LLAMA.config, "model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": S // 4}
    m = ModelConfig.from_hf(config)

    windowed_core, full_core = (m.per_layer[layer].attention for layer in (0, 1))
    assert isinstance(windowed_core, Attention)
    assert isinstance(full_core, Attention)
    assert full_core.keys_per_token(S) == S / 2
    assert windowed_core.keys_per_token(S) == S / 4 * (1 - 1 / 8)
    assert windowed_core.keys_per_token(S // 8) == S / 16
    windowed, full = (model_units(m, A100S, RunOptions(sequence_length=S)).units[i] for i in (1, 3))
    assert windowed.forward < full.forward
    assert windowed.activation == full.activation


def test_an_unfused_activation_function_saves_two_more_tensors() -> None:
    options = RunOptions(sequence_length=S)
    fused, unfused = (model_units(LLAMA, A100S, options, framework=f) for f in (MEGATRON, EAGER))

    assert layer_bytes(unfused) - layer_bytes(fused) == S * 2 * LLAMA.ffn


@pytest.mark.parametrize("tensor", [1, 8])
def test_gpt_saves_34h_5as_bytes_per_token_and_selective_34h(tensor: int) -> None:
    h, a = GPT3.hidden, GPT3.heads
    units = model_units(GPT3, A100S, RunOptions(sequence_length=S, tensor=tensor), framework=SCORES)

    assert layer_bytes(units) == S * (34 * h + 5 * a * S) / tensor
    assert layer_bytes(units, "selective") == layer_bytes(units, "core") == S * 34 * h / tensor


def test_ten_tensors_are_undivided_without_sequence_parallelism() -> None:
    h, a, t = GPT3.hidden, GPT3.heads, 8
    framework = replace(SCORES, sequence_parallel=False)
    units = model_units(GPT3, A100S, RunOptions(sequence_length=S, tensor=t), framework=framework)

    assert layer_bytes(units) == S * (10 * h + 24 * h / t + 5 * a * S / t)


@pytest.mark.parametrize("zero", [0, 2])
def test_an_undivided_layer_costs_as_much_as_its_halves(zero: int) -> None:
    options = RunOptions(sequence_length=S, data=2, zero=zero)
    unfused, m = replace(MEGATRON, fused_activation=False), replace(LLAMA, norm="layernorm")
    halves, layers = (model_units(replace(m, whole_layers=w), A100S, options, framework=unfused) for w in (False, True))
    place = Placement.linear(2)
    half = LLAMA.layers + 1

    def costs(units: Units, cut: int, strategy: str, on_host: tuple[int, ...] = ()) -> Any:
        named = [(i, strategy if u.layer is not None else "none") for i, u in enumerate(units.units)]
        return units.stage_costs([named[:cut], named[cut:]], place, on_host=on_host)

    for strategy, on_host in (("none", ()), ("full", ()), ("none", (0,))):
        one, two = costs(layers, half // 2 + 1, strategy, on_host), costs(halves, half, strategy, on_host)
        for entry, values in vars(two).items():
            # Halves overlap with transfers separately, and so more.
            if entry not in OVERLAPS:
                assert getattr(one, entry) == pytest.approx(values), entry


def with_mlps(m: ModelConfig, mlp: Mlp | Experts) -> ModelConfig:
    """The model with this MLP in every layer."""
    return replace(m, per_layer=tuple(replace(layer, mlp=mlp) for layer in m.per_layer))


def test_a_shared_expert_adds_an_mlp() -> None:
    m = models["mixtral-8x7b"]
    assert m.experts is not None
    shared = with_mlps(m, replace(m.experts, shared=m.ffn))
    one, two = (layer(model_units(model, A100S, RunOptions(sequence_length=S)))[1] for model in (m, shared))
    dense = layer(model_units(with_mlps(m, Mlp()), A100S, RunOptions(sequence_length=S)))[1]

    assert shared.parameters - m.parameters == m.layers * 3 * m.hidden * m.ffn
    assert two.activation - one.activation == dense.activation - 2 * 2 * S * m.hidden
    assert one.forward < two.forward < one.forward + dense.forward


def test_cmb_and_mlp_drop_the_bytes_of_obscura() -> None:
    """Obscura: "OHP-CMB reduces activation size by 40%"; its Table 1 fits 0.367 of the bytes with MLP."""
    units = model_units(models["llama2-28b"], A100S, RunOptions(sequence_length=4096), framework=EAGER)
    attention, mlp = layer(units)

    assert 1 - layer_bytes(units, "cmb") / layer_bytes(units) == pytest.approx(0.40, abs=0.01)
    with_mlp = attention.activation + mlp.strategies["full"].activation
    assert with_mlp / layer_bytes(units) == pytest.approx(0.37, abs=0.01)


def test_full_recomputation_repeats_the_forward() -> None:
    units = model_units(LLAMA, A100S, RunOptions(sequence_length=S))
    for unit in layer(units):
        assert unit.strategies["full"].activation == S * 2 * LLAMA.hidden
        assert unit.strategies["full"].recompute == unit.forward


@pytest.mark.parametrize(("framework", "inputs"), [(MEGATRON, 1), (EAGER, 2)])
def test_a_recomputed_layer_saves_one_input_if_halves_share_it(framework: Any, inputs: int) -> None:
    units = model_units(LLAMA, A100S, RunOptions(sequence_length=S), framework=framework)
    costs = units.stage_costs([[(0, "none"), (1, "full"), (2, "full"), (3, "none")]], Placement.linear(1))
    one_input = S * 2 * LLAMA.hidden
    plain = units.units[3].activation

    assert costs.activation_recomputed[0] - plain == inputs * one_input
    assert costs.recompute_workspace is not None
    attention, mlp = layer(units)
    # The head has freed its activation; so has the MLP its input when attention recomputes separately.
    separate = max(mlp.activation - one_input - plain, attention.activation - 2 * one_input - plain)
    assert costs.recompute_workspace[0] == (layer_bytes(units) - one_input - plain if inputs == 1 else separate)
    mlp_only = units.stage_costs([[(1, "none"), (2, "full")]], Placement.linear(1))
    assert mlp_only.activation_recomputed[0] == units.units[1].activation + one_input  # The MLP saves its input.


def test_strategies_of_subsets_add_up() -> None:
    units = model_units(LLAMA, A100S, RunOptions(sequence_length=S), framework=EAGER)
    s = layer(units)[1].strategies
    dropped = {name: s["none"].activation - s[name].activation for name in s}

    assert dropped["norm+activation+multiply"] == dropped["norm"] + dropped["activation"] + dropped["multiply"]
    assert s["norm+activation"].recompute == s["norm"].recompute + s["activation"].recompute
    assert dropped["mlp"] == S * 8 * LLAMA.ffn


@pytest.mark.parametrize(
    ("options", "per_parameter"),
    [
        (RunOptions(), 18),
        (RunOptions(data=4, context=2, zero=1), 6 + 12 / 8),
        (RunOptions(data=8, zero=2), 2 + 16 / 8),
        (RunOptions(dtype="fp32", data=8, zero=3), 16 / 8),
        (RunOptions(optimizer="sgd"), 10),
    ],
)
def test_states_follow_optimizer_dtype_and_zero(options: RunOptions, per_parameter: float) -> None:
    unit = layer(model_units(LLAMA, A100S, options))[0]

    assert unit.static == pytest.approx(LLAMA.attention_parameters(0) * per_parameter, rel=1e-12)
    assert unit.states is not None
    assert unit.states.weights + unit.states.gradients + unit.states.optimizer == pytest.approx(unit.static)


def test_zero_2_and_fsdp_wait_for_slow_collectives() -> None:
    slow = Cluster.from_dict({"devices": "8xA100-80GB", "link_bandwidth": 1e8, "devices_per_node": 8})

    def attention(cluster: Cluster, zero: int) -> Unit:
        fsdp = Framework(gathers_units=True)
        return layer(model_units(LLAMA, cluster, RunOptions(data=8, zero=zero), framework=fsdp))[0]

    plain = attention(slow, 1)
    speed = Speed(slow.slowest, 2)
    parameters = LLAMA.attention_parameters(0)
    once = speed.gather(parameters, 8, alongside=8)
    latency = slow.slowest.link_latency
    scattered, gathered = latency + 4 * (once - latency), latency + 2 * (once - latency)
    backward = plain.backward_input + plain.backward_weight
    two, three = attention(slow, 2), attention(slow, 3)

    def slowed(collectives: float, computing: Any, size: int) -> Any:
        """On slow links, memory traffic bounds the slowdown of computation that overlaps collectives."""
        return max(collectives, computing) + OVERLAP_TRAFFIC * size * parameters / slow.slowest.memory_bandwidth

    assert two.forward == plain.forward
    assert two.backward_input + two.backward_weight == pytest.approx(slowed(scattered, backward, 4))
    assert three.forward == pytest.approx(slowed(gathered, plain.forward, 2))
    assert three.backward_input + three.backward_weight == pytest.approx(slowed(gathered + scattered, backward, 6))


def test_fast_collectives_slow_down_computation() -> None:
    cluster = Cluster.from_dict({"devices": "8xA100-80GB", "link_bandwidth": 2e12, "link_latency": 1e-6})
    framework = Framework(gathers_units=True)
    plain, fsdp = (
        layer(model_units(LLAMA, cluster, RunOptions(data=8, zero=zero), framework=framework))[0] for zero in (1, 3)
    )
    gather = Speed(cluster.slowest, 2).gather(2 * LLAMA.attention_parameters(0), 8, alongside=8)
    assert fsdp.forward - plain.forward == pytest.approx(OVERLAP_SLOWDOWN * gather)


def test_zero_3_gathers_stages_during_computation() -> None:
    options = RunOptions(data=8, zero=3)
    units = model_units(LLAMA, A100S, options)
    parameters = LLAMA.attention_parameters(0)
    speed = Speed(A100S.slowest, 2)
    latency, bandwidth = speed.ring(8, alongside=8)
    unit = layer(units)[0]
    assert unit.gathered == 2 * parameters
    assert unit.parameter_gather == pytest.approx(2 * parameters * 7 / 8 / bandwidth)
    assert unit.forward == layer(model_units(LLAMA, A100S, replace(options, zero=1)))[0].forward

    costs = units.stage_costs(Partition.cut(units, [22, 22, 22]), Placement.of([0, 0, 0]))
    assert sum(costs.gathered) == pytest.approx(2 * LLAMA.parameters)
    assert costs.parameter_gather[1] == pytest.approx(latency + costs.gathered[1] * 7 / 8 / bandwidth)
    states = sum(unit.static for unit in units.units)
    workspace = max(unit.workspace for unit in units.units)
    [static] = costs.static
    assert static == pytest.approx(states + workspace + sum(sorted(costs.gathered)[1:]))


def test_devices_keep_weights_and_gradients_of_hosted_states() -> None:
    unit = layer(model_units(LLAMA, A100S, RunOptions()))[0]

    assert unit.on_host is not None
    assert unit.on_host.static == LLAMA.attention_parameters(0) * 6
    assert (unit.on_host.gradients, unit.on_host.parameters) == (
        LLAMA.attention_parameters(0) * 4,
        LLAMA.attention_parameters(0) * 2,
    )


@pytest.mark.parametrize(
    ("options", "shards", "replicas"),
    [({"data": 8, "expert": 4}, 4, 2), ({"tensor": 2, "data": 4, "expert": 8, "expert_tensor": 1}, 8, 1)],
)
def test_experts_are_divided_over_expert_parallel_ranks(options: dict[str, Any], shards: int, replicas: int) -> None:
    m = models["mixtral-8x7b"]
    experts, run = m.expert_parameters(0), RunOptions(zero=1, **options)
    unit = layer(model_units(m, A100S, run))[1]
    dense = (m.mlp_parameters(0) - experts) / run.tensor

    expected = dense * (6 + 12 / run.data) + experts / shards * (6 + 12 / replicas)
    assert unit.static == pytest.approx(expected, rel=1e-12)


def test_the_head_keeps_fp32_logits_until_its_backward() -> None:
    head = model_units(LLAMA, A100S, RunOptions(sequence_length=S, tensor=2)).units[-1]

    assert head.activation == S * (4 * LLAMA.hidden + 4 * LLAMA.vocab) / 2


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(1, 4),
    sequence=st.sampled_from([512, 2048, 8192]),
    flash=st.booleans(),
)
def test_every_strategy_saves_less_for_more_time(tensor: int, size: int, sequence: int, flash: bool) -> None:
    options = RunOptions(micro_batch_size=size, sequence_length=sequence, tensor=tensor)
    units = model_units(LLAMA, A100S, options, framework=replace(MEGATRON, flash=flash))
    for unit in (*layer(units), units.units[-1]):
        for strategy in unit.strategies.values():
            assert unit.strategies["full"].activation <= strategy.activation <= unit.activation
            assert 0 <= strategy.recompute <= unit.strategies["full"].recompute
        assert unit.backward_input + unit.backward_weight > unit.forward


def test_the_efficiencies_of_a_cluster_file_are_used() -> None:
    slow = Cluster.from_dict({"devices": "8xA100-80GB", "efficiency": {"matmul": [[1, 0.1]], "launch": 1e-9}})
    m = ModelConfig.from_hf({**models["llama2-7b"].config, "num_hidden_layers": 1})
    unit = model_units(m, slow, RunOptions(sequence_length=S)).units[2]
    products = 3 * 2 * S * m.hidden * m.ffn / (312e12 * 0.1)

    assert unit.backward_weight == pytest.approx(products, rel=1e-6)


def test_pipeline_devices_take_the_smallest_limit_of_their_ranks() -> None:
    cluster = Cluster.from_dict({"devices": "4xA100-80GB", "memory_limit": [40, 30, 20, 10]})

    assert model_units(LLAMA, cluster, RunOptions(tensor=2)).memory_limit == (30, 10)
    assert model_units(LLAMA, cluster).memory_limit == (40, 30, 20, 10)


def test_devices_on_a_pcie_switch_share_its_host_link() -> None:
    single = model_units(LLAMA, Cluster.parse("4xA100-80GB"))
    pairs = model_units(LLAMA, Cluster.parse("4xA100-80GB"), RunOptions(tensor=2))
    hopper = model_units(LLAMA, Cluster.parse("4xH100-80GB"))

    assert single.link_groups == ((0, 1), (2, 3))
    assert pairs.link_groups == hopper.link_groups == ()
    assert single.offload_bandwidth == 2 * pairs.offload_bandwidth  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "pipeline", "sentence"),
    [
        ({"tensor": 3}, None, "64 devices cannot be divided into groups of 3"),
        ({"tensor": 64}, None, "32 attention heads cannot be divided over 64"),
        ({}, 65, "65 pipeline devices of 1 ranks each need 65 devices, but the cluster has 64"),
        ({"context": 2, "sequence_length": 5}, None, "A sequence of 5 cannot be divided over 2"),
        ({"micro_batch_size": 0}, None, "at least one sequence of at least one token"),
        ({"dtype": "fp6"}, None, "There is no dtype 'fp6'"),
        ({"lora": -1}, None, "The rank of LoRA adapters must be at least 1 (or 0 for none) and at most"),
        ({"quantize": "nf4"}, None, "something must train with them: give --lora RANK, too"),
        ({"lora": 8, "quantize": "int4"}, None, "may be quantised to nf4 or nf4-dq, not to 'int4'"),
        ({"data": 2, "expert": 2}, None, "The model has no experts: leave out --expert and --expert-tensor."),
        ({"expert": 2}, None, "2 expert-parallel ranks do not divide the 1 x 1"),
        ({"tensor": 2, "expert": 4, "expert_tensor": 1}, None, "4 expert-parallel x 1 expert-tensor-parallel ranks do"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], pipeline: int | None, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        model_units(LLAMA, A100S, RunOptions(**options), pipeline=pipeline)


def test_learned_positions_limit_the_sequence_length() -> None:
    with pytest.raises(InputError, match="learned positions for 2048 tokens; a sequence of 4096 is too long"):
        model_units(GPT3, A100S, RunOptions(sequence_length=4096))


@pytest.mark.parametrize("lengths", [[22, 22, 23], [22, 22, 21]])
def test_stages_of_another_model_are_refused(lengths: list[int]) -> None:
    units = model_units(LLAMA, A100S, RunOptions())
    with pytest.raises(InputError, match=rf"stages have {sum(lengths)} units, but its model has 66: plan again"):
        Partition.cut(units, lengths)


@pytest.mark.parametrize(
    ("options", "framework"),
    [({"flash_attention": False}, SCORES), ({"sequence_parallel": False}, replace(MEGATRON, sequence_parallel=False))],
)
def test_options_without_fused_attention_or_sp_are_priced(options: dict[str, Any], framework: Framework) -> None:
    cluster, run = Cluster.parse("8xA100-80GB"), RunOptions(tensor=2)

    priced = model_units(models["llama2-7b"], cluster, replace(run, **options), pipeline=4)

    assert priced.units == model_units(models["llama2-7b"], cluster, run, pipeline=4, framework=framework).units


@pytest.mark.parametrize("framework", [MEGATRON, FSDP], ids=["stages", "units"])
def test_zero_3_divides_and_gathers_quantized_weights(framework: Framework) -> None:
    """FSDP-QLoRA as in Answer.AI's implementation: ranks store and exchange slices of the 4-bit codes."""
    m = models["llama3-8b"]
    options = RunOptions(sequence_length=S, lora=16, quantize="nf4", data=2)
    undivided, divided = (
        model_units(m, A100S, replace(options, zero=zero), framework=framework).units[1] for zero in (2, 3)
    )
    size = sum(quantized_bytes("nf4", weights) for weights in m.attention_matrices(0))
    unquantized = 2 * (m.attention_parameters(0) - sum(m.attention_matrices(0))) + 2 * m.attention_adapters(16)
    assert undivided.states is not None
    assert divided.states is not None
    assert undivided.states.weights == pytest.approx(size + unquantized, rel=1e-12)
    assert divided.states.weights == pytest.approx((size + unquantized) / 2, rel=1e-12)
    matrices = (*m.attention_matrices(0), *m.mlp_matrices(0))
    layer = sum(quantized_bytes("nf4", n) for n in matrices) + 2 * (m.layer_parameters(0) - sum(matrices))
    if framework.gathers_units:  # the current layer and the next one
        assert divided.workspace - undivided.workspace == pytest.approx(2 * layer, rel=1e-12)
    else:
        assert divided.gathered == pytest.approx(size + unquantized, rel=1e-12)


@pytest.mark.parametrize(("name", "tied"), [("llama3.2-1b", True), ("llama3-8b", False)])
def test_a_tied_embedding_counts_once_without_a_pipeline(name: str, tied: bool) -> None:
    """States take 18 bytes per parameter; a pipeline has a copy on its first and on its last stage."""
    model, cluster = models[name], Cluster.parse("2xH100-80GB")
    table = 18 * model.vocab * model.hidden

    def states(pipeline: int) -> float:
        options = RunOptions(data=2 // pipeline)
        return sum(float(unit.static) for unit in model_units(model, cluster, options, pipeline=pipeline).units)

    assert states(1) == pytest.approx(18 * model.parameters)
    assert states(2) - states(1) == pytest.approx(table if tied else 0.0)


def test_messages_within_a_node_take_its_links() -> None:
    cluster = Cluster.from_dict({"devices": "2x4xRTX-4090-24GB", "network_bandwidth": 1.25e9})
    units = model_units(LLAMA, cluster, RunOptions(sequence_length=S))
    (within,) = {units.message(a, a + 1) for a in (0, 1, 2, 4, 5, 6)}
    costs = units.stage_costs(Partition.cut(units, [8] * 7 + [10]), Placement.linear(8))

    speed = Speed.from_hardware(cluster.slowest, "bf16", MEGATRON)
    assert within == speed.message(2 * S * LLAMA.hidden, across_nodes=False)
    assert units.message(3, 4) == speed.message(2 * S * LLAMA.hidden, across_nodes=True)
    assert costs.communication[:7] == (within, within, within, units.communication, within, within, within)


def test_messages_between_nodes_take_the_network() -> None:
    units = model_units(LLAMA, Cluster.parse("2x4xRTX-4090-24GB"), RunOptions(sequence_length=S, tensor=4))

    assert units.communication_within_node is None
    assert units.message(0, 1) == units.min_communication == units.communication


GPT2_SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 768, "n_head": 12, "vocab_size": 50304, "n_positions": S}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def bytes_of_masks(framework: Framework, **dropouts: float) -> tuple[float, float]:
    """Bytes that the embedding and a layer of GPT-2 save for these dropouts."""
    entries: list[dict[str, Any]] = [{**GPT2_SMALL, **NO_DROPOUT, **dropouts}, {**GPT2_SMALL, **NO_DROPOUT}]
    several = [
        model_units(ModelConfig.from_hf(config), A100S, RunOptions(sequence_length=S), framework=framework)
        for config in entries
    ]
    tables = [float(units.units[0].strategies["none"].activation) for units in several]
    layers = [layer_bytes(units) for units in several]
    return tables[0] - tables[1], layers[0] - layers[1]


def test_every_dropout_saves_its_masks() -> None:
    assert bytes_of_masks(MEGATRON, embd_pdrop=0.1) == (S * 768, 0)
    assert bytes_of_masks(MEGATRON, resid_pdrop=0.1) == (0, 2 * S * 768)
    assert bytes_of_masks(MEGATRON, attn_pdrop=0.1) == (0, 0)
    # Scores are saved before and after dropout, with one byte of mask each.
    assert bytes_of_masks(SCORES, attn_pdrop=0.1) == (0, 3 * S * S * 12)


@pytest.mark.parametrize(
    ("config", "dropouts"),
    [
        ({"model_type": "seed_oss"}, (0.1, 0.1, 0.0)),
        ({"model_type": "seed_oss", "residual_dropout": 0.0}, (0.1, 0.0, 0.0)),
        ({"model_type": "gpt_neox", "hidden_dropout": 0.2}, (0.0, 0.2, 0.0)),
        ({"model_type": "gptj", "attn_pdrop": 0.3, "embd_pdrop": 0.2}, (0.3, 0.0, 0.2)),
        ({"model_type": "opt", "ffn_dim": 256, "word_embed_proj_dim": 64}, (0.0, 0.1, 0.1)),
        ({"model_type": "starcoder2", "embedding_dropout": 0.1}, (0.0, 0.0, 0.1)),
        ({"model_type": "llama", "attention_dropout": 0.1}, (0.1, 0.0, 0.0)),
    ],
)
def test_dropouts_are_read_by_the_names_of_their_family(config: dict[str, Any], dropouts: tuple[float, ...]) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    model = ModelConfig.from_hf({**sizes, "intermediate_size": 256, **config})
    assert (model.attention_dropout, model.residual_dropout, model.embedding_dropout) == dropouts
