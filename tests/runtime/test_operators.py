"""Operators that accumulate their parameters' gradients match torch's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from debubble.runtime.operators import Multiplication, WeightGradStore, deferrable_linear, look_up
from tests.support.runtime_cases import gradient_of

X = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[1, 4, 1], [0, 2, 4]])


def parameter(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def gradients(function: Any, *tensors: Any, times: int = 2) -> Any:
    """Gradients of the sum of squares, accumulated over several backwards."""
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    for _ in range(times):
        function(*copies).square().sum().backward()
    return [t.grad for t in copies]


def linear(x: Any, *multiplication: Any) -> Any:
    (y,) = deferrable_linear(x, [Multiplication(*multiplication)], weight_grads=WeightGradStore())
    return y


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("trained", ["x weight bias", "weight bias", "x bias", "x weight", "bias"])
def test_a_linear_operator_has_torchs_gradients(transposed: bool, trained: str) -> None:
    tensors = [X.clone(), parameter(4, 5) if transposed else parameter(5, 4), parameter(5)]
    for name, tensor in zip(("x", "weight", "bias"), tensors, strict=True):
        tensor.requires_grad_(name in trained.split())

    def ours(x: Any, weight: Any, bias: Any) -> Any:
        return linear(x, weight, bias, transposed)

    def torchs(x: Any, weight: Any, bias: Any) -> Any:
        return functional.linear(x, weight.t() if transposed else weight, bias)

    for actual, expected in zip(gradients(ours, *tensors), gradients(torchs, *tensors), strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", [lambda w: linear(X, w), lambda w: look_up(TOKENS, w)], ids=["linear", "look-up"])
def test_gradients_accumulate_in_place(operator: Any) -> None:
    weight = parameter(6, 4)
    operator(weight).sum().backward()
    address = gradient_of(weight).data_ptr()
    operator(weight).sum().backward()
    assert gradient_of(weight).data_ptr() == address


@pytest.mark.parametrize("frozen", [False, True])
def test_operators_share_a_saved_input(frozen: bool) -> None:
    weights = parameter(5, 4), parameter(3, 4).requires_grad_(not frozen), parameter(4, 6)
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def ours(x: Any, *weights: Any) -> Any:
        wide, narrow, transposed = (Multiplication(w, None, w.shape == (4, 6)) for w in weights)
        with saved_tensors_hooks(note, lambda tensor: tensor):
            results = deferrable_linear(x, [wide, narrow, transposed], weight_grads=WeightGradStore())
        return torch.cat(results, -1)

    def torchs(x: Any, wide: Any, narrow: Any, transposed: Any) -> Any:
        return torch.cat([functional.linear(x, wide), functional.linear(x, narrow), x @ transposed], -1)

    inputs = X.clone().requires_grad_(), *weights
    for actual, expected in zip(gradients(ours, *inputs), gradients(torchs, *inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert [tensor.shape for tensor in saved] == [X.shape] * 2
