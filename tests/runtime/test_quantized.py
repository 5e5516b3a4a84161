"""Adapters on frozen 4-bit weights train as on the dequantized weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import InputError, RunOptions
from debubble.models.config import ModelConfig
from debubble.models.quantization import NF4_BLOCK, quantized_bytes
from debubble.models.runtime_limits import beyond_runtime
from debubble.runtime.models.nf4 import NUMBERS, dequantized, dynamic_numbers, quantized
from tests.runtime.test_moving_units import assert_goes_on_alike
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import plan_of, run_threads, tokens_of
from tests.support.tiny_models import FAMILIES, GPT2, LLAMA, MIXTRAL

pytest.importorskip("transformers")

from tests.support.hf_reference import hf_model, loss_of


def schedule_for(devices: int, name: str = "1f1b") -> Any:
    return db.schedules[name](devices=devices, micro_batches=4)


def as_quantized(weight: torch.Tensor, format: str = "nf4") -> torch.Tensor:
    return dequantized(*quantized(weight, double=format == "nf4-dq")).view(weight.shape).to(weight.dtype)


class Adapted(torch.nn.Module):
    """A weight plus an adapter of scale 2."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, *, transposed: bool) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(factor.detach().clone()) for factor in (a, b))
        self.transposed = transposed

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        update = 2 * self.b @ self.a
        return weight + (update.t() if self.transposed else update)


def with_adapters(model: Any, plan: Any) -> dict[str, torch.Tensor]:
    """Model state with random adapter factors of the plan."""
    random = torch.Generator().manual_seed(0)
    made = {n: t for state in run_threads(plan, lambda p: p.state_dict()) for n, t in state.items() if ".lora_" in n}
    adapters = {n: 0.2 * torch.randn(t.shape, generator=random, dtype=t.dtype) for n, t in made.items()}
    return {**model.state_dict(), **adapters}


def adapted(model: Any, state: Any, format: str = "nf4") -> dict[str, torch.nn.Parameter]:
    """Quantize linear layers of a transformers model and add a state's adapters; returns the factors by name."""
    factors: dict[str, torch.nn.Parameter] = {}
    for name in [name.removesuffix(".lora_A.weight") for name in state if ".lora_A." in name]:
        module = model.get_submodule(name)
        module.weight.data = as_quantized(module.weight.data, format)
        a, b = (state[f"{name}.lora_{which}.weight"] for which in "AB")
        adapter = Adapted(a, b, transposed=not isinstance(module, torch.nn.Linear))
        torch.nn.utils.parametrize.register_parametrization(module, "weight", adapter)
        factors |= {f"{name}.lora_A.weight": adapter.a, f"{name}.lora_B.weight": adapter.b}
    return factors


WIDE: dict[str, Any] = {
    "llama": {**LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    "gpt2": {**GPT2, "n_embd": 128, "n_head": 2, "n_layer": 2},
}
"""Models whose blocks two ranks can share evenly."""


@pytest.mark.parametrize(
    ("config", "schedule", "devices", "options"),
    [
        (LLAMA, "zb-h1", 2, {"quantize": "nf4-dq"}),
        (FAMILIES["gemma2"], "1f1b", 1, {"quantize": "nf4"}),
        (GPT2, "zb-h1", 4, {"quantize": "nf4"}),
        (WIDE["llama"], "zb-h1", 2, {"quantize": "nf4", "tensor": 2}),
        (WIDE["gpt2"], "zb-h1", 2, {"quantize": "nf4", "tensor": 2}),
    ],
    ids=["llama", "gemma2", "gpt2", "divided llama", "divided gpt2"],
)
def test_adapters_train_on_dequantized_weights(
    config: Any, schedule: str, devices: int, options: dict[str, Any]
) -> None:
    model, tokens = hf_model(config), tokens_of(config, rows=4)
    alone, plan = (
        plan_of(schedule_for(devices, schedule), model.config.to_dict(), lora=3, **{**options, **more})
        for more in ({"tensor": 1}, {})
    )
    state = with_adapters(model, alone)

    def one(pipeline: Any) -> Any:
        pipeline.load_state_dict(state)
        pipeline.optimizer = torch.optim.SGD(pipeline.parameters(), lr=1.0)
        loss = pipeline.step(tokens)
        pipeline.optimizer.step()
        return loss, pipeline.state_dict()

    answers = run_threads(plan, one)
    factors = adapted(model, state, options["quantize"])
    torch.testing.assert_close(answers[0][0], loss_of(model, tokens, micro_batches=4), rtol=1e-12, atol=0)
    actual = {n: t for _, tensors in answers for n, t in tensors.items()}
    for n, weight in state.items():
        if n in factors:
            gradient = factors[n].grad
            assert gradient is not None
            assert (weight - actual[n] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), n
        elif n in actual:
            is_linear = n.removesuffix("weight") + "lora_A.weight" in factors
            assert torch.equal(actual[n], as_quantized(weight, options["quantize"]) if is_linear else weight), n


def test_codes_are_nearest_values_scaled_by_the_block_maximum() -> None:
    weight = torch.randn(6, 2 * NF4_BLOCK, generator=torch.Generator().manual_seed(0))
    codes, scales = quantized(weight)
    assert (codes.shape, codes.dtype, scales.shape) == ((6, NF4_BLOCK), torch.uint8, (6, 2))
    blocks = weight.view(6, 2, NF4_BLOCK)
    assert torch.equal(scales, blocks.abs().amax(2))
    numbers = torch.tensor(NUMBERS)
    nearest = (blocks[..., None] / scales[..., None, None] - numbers).abs().argmin(-1)
    assert torch.equal(dequantized(codes, scales), (numbers[nearest] * scales[..., None]).view(weight.shape))


def test_quantising_twice_changes_nothing_and_zeros_stay() -> None:
    weight = torch.cat([torch.randn(3, NF4_BLOCK), torch.zeros(1, NF4_BLOCK)])
    once = as_quantized(weight)
    assert torch.equal(as_quantized(once), once)
    assert not once[3].any()


@given(rows=st.integers(1, 40), blocks=st.integers(1, 12), seed=st.integers(0, 99), spread=st.floats(0, 3))
@settings(max_examples=25)
def test_quantized_scales_are_rounded_to_nearest(rows: int, blocks: int, seed: int, spread: float) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, blocks * NF4_BLOCK, generator=random)
    weight *= torch.exp(spread * torch.randn(rows, 1, generator=random))
    _, plain = quantized(weight)
    codes, of_scales, maxima, mean = quantized(weight, double=True)
    assert torch.equal(codes, quantized(weight)[0])
    assert sum(t.nbytes for t in (codes, of_scales, maxima, mean)) == quantized_bytes("nf4-dq", weight.numel())
    torch.testing.assert_close(mean, plain.mean().view(1))
    numbers = torch.tensor(dynamic_numbers())
    assert (len(numbers), numbers[127].item(), numbers[-1].item()) == (256, 0, 1)
    for first in range(0, rows * blocks, 256):
        distances = (plain.flatten() - mean)[first : first + 256]
        largest = distances.abs().max()
        assert maxima[first // 256] == largest
        off = (largest * numbers[:, None] - distances).abs()
        chosen = off.gather(0, of_scales.flatten()[first : first + 256].long()[None])[0]
        torch.testing.assert_close(chosen, off.amin(0), atol=1e-6 * float(largest), rtol=0)


def test_double_quantization_matches_bitsandbytes() -> None:
    library = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 5 * NF4_BLOCK, generator=torch.Generator().manual_seed(0))
    for double in (False, True):
        packed = library.quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=double)
        expected = library.dequantize_4bit(*packed)
        actual = as_quantized(weight, "nf4-dq" if double else "nf4")
        # Its kernel rounds a few scales to a neighbor of the nearest number.
        assert torch.isclose(actual, expected, rtol=1e-6, atol=1e-7).double().mean() >= 0.99
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("config", "format"), [(GPT2, "nf4"), (MIXTRAL, "nf4-dq")], ids=["gpt2", "mixtral"])
def test_the_device_holds_the_bytes_of_codes_and_scales(config: Any, format: str) -> None:
    def sizes(quantize: Any) -> Any:
        plan = plan_of(schedule_for(2), config, dtype="bf16", lora=2, quantize=quantize)
        return [
            static
            for static, _ in run_threads(plan, lambda p: (p.measured.static_bytes, p.step(tokens_of(config, rows=4))))
        ]

    plan = plan_of(schedule_for(2), config, dtype="bf16")
    model = db.Model.from_hf(config)
    for stage, plain, small in zip(plan.partition, sizes(None), sizes(format), strict=True):
        layers = {"attention": model.attention_matrices, "mlp": model.mlp_matrices}
        matrices = [n for unit in stage if unit.layer is not None for n in layers[unit.type](unit.layer)]
        assert plain - small == sum(2 * weights - quantized_bytes(format, weights) for weights in matrices)


def test_float_checkpoint_is_quantized_when_loaded(tmp_path: Path) -> None:
    format = "nf4-dq"
    model = hf_model(LLAMA).float()
    model.save_pretrained(tmp_path)
    plan = plan_of(schedule_for(2), LLAMA, dtype="fp32", lora=2, quantize=format)

    def one(pipeline: Any) -> Any:
        pipeline.load_pretrained(tmp_path)
        return pipeline.state_dict()

    actual = {name: tensor for state in run_threads(plan, one) for name, tensor in state.items()}
    for name, weight in model.state_dict().items():
        linear = name.endswith("_proj.weight")
        assert torch.equal(actual[name], as_quantized(weight, format) if linear else weight), name


def test_units_with_quantised_weights_move() -> None:
    before, after = (
        plan_of(schedule_for(2), LLAMA, counts=counts, dtype="bf16", lora=2, quantize="nf4-dq")
        for counts in ([4, 6], [7, 3])
    )
    assert_goes_on_alike(before, after)


def test_unsupported_quantization_is_refused() -> None:
    def refusal(config: Any = LLAMA, **options: Any) -> str:
        return str(beyond_runtime(RunOptions(**{"lora": 4, "quantize": "nf4", **options}), ModelConfig.from_hf(config)))

    assert "make the plan with nf4 in place of nf4-dq" in refusal(WIDE["llama"], quantize="nf4-dq", tensor=2)
    assert "are no whole blocks of 64 quantised weights" in refusal(tensor=2)
    assert beyond_runtime(RunOptions(lora=4, quantize="nf4", tensor=2), ModelConfig.from_hf(WIDE["llama"])) is None
    assert "are no whole blocks of 64 quantised weights" in refusal(WIDE["llama"], tensor=4)
    assert "ZeRO-3 divides no quantised weights" in refusal(zero=3)
    assert "it has no LoRA for 'olmo2'" in refusal(GENERIC["olmo2"])
    plan = plan_of(schedule_for(1), LLAMA, lora=2, quantize="nf4")
    with pytest.raises(InputError, match="fp8 multiplies weights of the run's dtype"):
        run_threads(plan, lambda pipeline: None, fp8=True)
