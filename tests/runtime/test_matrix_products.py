"""Large fp32 products of both libraries are compared with fp64."""

import pytest
import torch
from torch import Tensor

from debubble.runtime.matrix_products import add_product_to, linear, product

ROWS, INPUTS, OUTPUTS = 192, 160, 128


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size) * size[0]))


X, WEIGHT, BIAS, GRADIENT = (
    numbers(2, ROWS // 2, INPUTS),
    numbers(OUTPUTS, INPUTS),
    numbers(OUTPUTS),
    numbers(ROWS, OUTPUTS),
)


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether oneDNN may compute the products."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", request.param)


def assert_near(actual: Tensor, exact: Tensor) -> None:
    assert actual.dtype == torch.float32
    assert (actual - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [None, BIAS])
def test_a_linear_layer_has_the_product_and_the_bias(bias: Tensor | None) -> None:
    exact = torch.nn.functional.linear(X.double(), WEIGHT.double(), None if bias is None else bias.double())
    assert_near(linear(X, WEIGHT, bias), exact)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize(
    ("a", "b"), [(GRADIENT, WEIGHT), (GRADIENT.t(), X.flatten(0, 1)), (X.flatten(0, 1).t(), GRADIENT)]
)
def test_products_are_written_or_accumulated_in_place(a: Tensor, b: Tensor) -> None:
    exact = a.double() @ b.double()
    assert_near(product(a, b), exact)
    total = torch.ones(exact.shape)
    assert add_product_to(total, a, b) is total
    assert_near(total, 1 + exact)
    assert product(a, b, out=total) is total
    assert_near(total, exact)


def test_without_onednn_torch_computes_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert torch.equal(product(GRADIENT, WEIGHT), GRADIENT @ WEIGHT)
