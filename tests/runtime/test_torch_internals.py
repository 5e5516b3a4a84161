"""Private names of torch are all in one file of the runtime and exist in this torch."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import debubble.runtime
from debubble.runtime import torch_internals

PRIVATE = re.compile(
    r"\b(?:torch(?:\.\w+)*|aten|mkldnn)\._\w+|^\s*from torch\S* import _\w+|^\s*from torch\S*\._", re.M
)
LAZY = "torch._dynamo"
"""Used only as a string, to see whether torch has loaded it."""
OF_TENSORS = ("_version", "_is_view", "_post_accumulate_grad_hooks")
OF_MODULES = ("_buffers", "_compiled_call_impl")


def test_private_torch_names_are_used_in_one_file() -> None:
    root = Path(debubble.runtime.__file__).parent
    named = {
        (file.name, name)
        for file in root.rglob("*.py")
        if file.name != "torch_internals.py"
        for name in PRIVATE.findall(file.read_text().replace(f'"{LAZY}"', ""))
    }
    assert named == set()


def test_operators_are_those_of_this_torch() -> None:
    assert torch_internals.fused_rms_norm.default is not torch_internals.fused_rms_norm_backward.default
    assert torch_internals.flash_attention.default is not torch_internals.flash_attention_backward.default
    assert torch_internals.efficient_attention.default is not torch_internals.efficient_attention_backward.default


def test_tensors_and_modules_have_their_private_attributes() -> None:
    assert [name for name in OF_TENSORS if not hasattr(nn.Parameter(torch.ones(1)), name)] == []
    assert [name for name in OF_MODULES if not hasattr(nn.Linear(1, 1), name)] == []
