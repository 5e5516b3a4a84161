"""Private names of torch: all are in one file of the runtime, and are there in this torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import debubble.runtime
from debubble.runtime import torch_internals

PRIVATE = re.compile(
    r"\b(?:torch(?:\.\w+)*|aten|mkldnn)\._\w+|^\s*from torch\S* import _\w+|^\s*from torch\S*\._", re.M
)
LAZY = "torch._dynamo"
"""Named as a string alone: whether torch has loaded it."""
OF_TENSORS = ("_version", "_is_view", "_post_accumulate_grad_hooks")
OF_MODULES = ("_buffers", "_compiled_call_impl")


def test_no_other_file_names_what_is_private() -> None:
    root = Path(debubble.runtime.__file__).parent
    named = {
        (file.name, name)
        for file in root.rglob("*.py")
        if file.name != "torch_internals.py"
        for name in PRIVATE.findall(file.read_text().replace(f'"{LAZY}"', ""))
    }
    assert named == set()


def test_operators_are_those_of_this_torch() -> None:
    assert torch_internals.unsafe_view(torch.ones(2, 3), [6]).shape == (6,)
    assert torch_internals.fused_rms_norm.default is not torch_internals.fused_rms_norm_backward.default
    assert torch_internals.flash_attention.default is not torch_internals.flash_attention_backward.default
    assert torch_internals.efficient_attention.default is not torch_internals.efficient_attention_backward.default


def test_attention_on_the_cpu_gives_logarithms_of_sums() -> None:
    x = torch.ones(1, 1, 2, 4)
    output, log_sum = torch_internals.flash_attention_on_cpu(x, x, x, 0.0, False, scale=0.25)
    gradients = torch_internals.flash_attention_on_cpu_backward(x, x, x, x, output, log_sum, 0.0, False, scale=0.25)
    assert log_sum.flatten().tolist() == pytest.approx(2 * [1 + torch.tensor(2.0).log().item()])
    assert [g.shape for g in gradients] == 3 * [x.shape]


def test_onednn_multiplies_as_torch_does() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    if torch_internals.has_onednn_linear():
        assert torch_internals.onednn_linear(x, weight, None).tolist() == (x @ weight.t()).tolist()


def test_saved_tensor_hooks_are_those_of_the_context() -> None:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert torch_internals.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        assert torch_internals.saved_tensor_hooks() == (keep, keep)


def test_a_backward_is_known_from_inside() -> None:
    x, inside = torch.ones(1, requires_grad=True), []
    y = 2 * x
    y.register_hook(lambda _: inside.append(torch_internals.runs_in_backward()))
    y.sum().backward()
    assert [torch_internals.runs_in_backward(), *inside] == [False, True]


def test_a_strided_shard_has_its_parts() -> None:
    assert torch_internals.strided_shard(1, parts=3).split_factor == 3


def test_shapes_follow_from_fake_tensors() -> None:
    with torch_internals.FakeTensorMode():
        assert (torch.empty(2, 3) @ torch.empty(3, 4)).shape == (2, 4)


@pytest.mark.parametrize("name", OF_TENSORS)
def test_tensors_have_their_private_attributes(name: str) -> None:
    assert hasattr(nn.Parameter(torch.ones(1)), name)


@pytest.mark.parametrize("name", OF_MODULES)
def test_modules_have_their_private_attributes(name: str) -> None:
    assert hasattr(nn.Linear(1, 1), name)
