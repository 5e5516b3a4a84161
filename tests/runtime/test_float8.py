"""Linear layers in fp8 match torchao, also with split backwards; unsupported cases are refused."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import debubble as db
from debubble.ir import InputError, RunOptions
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.distributed.transport import SingleProcessTransport
from debubble.runtime.models import float8
from debubble.runtime.models.units import MicroBatch
from debubble.runtime.operators import Linear
from tests.runtime.test_modules import VOCABULARY, plan_for, step, tokens
from tests.support.generic_cases import GENERIC
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import gradients_of, plan_of, run_threads, tokens_of
from tests.support.tiny_models import GPT2_UNTIED, LLAMA

installed = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")


def schedule(name: str, devices: int) -> Any:
    return db.schedules[name](devices=devices, micro_batches=4)


class EachLayer(TensorGroup):
    """One rank that calls the layers of a common input one by one."""

    def column_parallel(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in layers)


def by_torchao(layer: Any) -> Any:
    """Forward of torchao's Float8Linear with a layer's parameters."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    weight = layer.weight.t() if layer.transposed else layer.weight
    with torch.device("meta"):
        plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    converted = Float8Linear.from_float(plain, config=Float8LinearConfig(emulate=True))
    del converted.weight

    def forward(x: Tensor) -> Tensor:
        converted.weight = layer.weight.t() if layer.transposed else layer.weight
        y: Tensor = converted(x)
        return y if layer.bias is None else y + layer.bias

    return forward


def reference(config: Any, tokens: Any) -> Any:
    """Loss and gradients of one process with torchao's layers in the half-layers."""
    model = ReferenceModel(config, dtype=torch.float32)
    for unit in model.units[1:-1]:
        unit.group = EachLayer(SingleProcessTransport(), (0,))  # type: ignore[assignment]
        for layer in unit.modules():
            if isinstance(layer, Linear):
                layer.forward = by_torchao(layer)  # type: ignore[method-assign]
    targets = tokens[:, 1:].contiguous()
    total = torch.zeros(())
    for x, y in zip(tokens[:, :-1].chunk(4), targets.chunk(4), strict=True):
        loss = model(x.contiguous(), MicroBatch(targets=y.contiguous(), scale=1 / targets.numel()))
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.hf_parameters().items()}


@installed
@pytest.mark.parametrize(
    ("config", "name", "devices", "strategy"),
    [
        (LLAMA, "1f1b", 2, "none"),
        (LLAMA, "zb-v", 2, "none"),
        (LLAMA, "1f1b", 4, "full"),
        (GPT2_UNTIED, "zb-h1", 2, "none"),
    ],
)
def test_gradients_match_torchao(config: Any, name: str, devices: int, strategy: str) -> None:
    tokens = tokens_of(config, rows=4, length=16)
    expected_loss, expected = reference(config, tokens)
    plan = plan_of(schedule(name, devices), config, dtype="fp32", strategy=strategy)
    loss, gradients = gradients_of(plan, tokens, fp8="emulated")
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


@installed
def test_eight_bits_change_the_gradients() -> None:
    tokens = tokens_of(LLAMA, rows=4)
    plan = plan_of(schedule("1f1b", 1), LLAMA, dtype="fp32")
    losses = [run_threads(plan, lambda pipeline: pipeline.step(tokens), fp8=fp8)[0] for fp8 in (False, "emulated")]
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.05, atol=0)


@installed
def test_torchao_converts_custom_modules() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, VOCABULARY)]
    model = nn.Sequential(*layers)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: module.out_features % 16 == 0,
    )
    assert [type(module) is Float8Linear for module in model] == [False, True, False, True, False]
    plan = plan_for(schedule("1f1b", 2), [2, 3])
    plan = replace(plan, options=RunOptions(dtype="fp32"))
    total = torch.zeros(())
    for rows in tokens().chunk(4):
        logits, targets = model(rows[:, :-1]), rows[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / tokens()[:, 1:].numel()).backward()
        total += loss.detach() / tokens()[:, 1:].numel()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    actual_loss, gradients = step(model, plan)
    torch.testing.assert_close(actual_loss, total, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert gradient is not None
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_device_without_fp8_products_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=r"fp8 needs a GPU that multiplies in 8 bits .*, not cpu: use bf16"):
        run_threads(plan_of(schedule("1f1b", 1), LLAMA), lambda _: None, fp8=True)


def test_without_torchao_it_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="fp8 needs torchao: install the package torchao"):
        run_threads(plan_of(schedule("1f1b", 1), LLAMA), lambda _: None, fp8=True)


def test_transformers_modules_are_refused() -> None:
    with pytest.raises(InputError, match="fp8 is for units of debubble's own: convert modules of yours"):
        run_threads(plan_of(schedule("1f1b", 1), GENERIC["olmo2"]), lambda _: None, fp8=True)
