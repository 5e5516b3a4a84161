"""The private names of torch that the runtime uses: nothing public does the same.

No other file of the runtime has any, but for attributes of tensors and modules (`tests/runtime/test_torch_internals.py`
lists these).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

_aten = torch.ops.aten

# Attention that returns the logarithms of sums, by which results of blocks of keys are merged, and its gradients
flash_attention_on_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_on_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward

# Norms that keep one number per row, and their gradients
fused_rms_norm, fused_rms_norm_backward = _aten._fused_rms_norm, _aten._fused_rms_norm_backward

unsafe_view = _aten._unsafe_view
"""A view that autograd takes for a tensor of its own, which may be changed in place."""


def strided_shard(dim: int, *, parts: int) -> Any:
    """The placement of chunk i of each of so many equal parts of a dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard  # takes a second, and most runs need none

    return _StridedShard(dim, split_factor=parts)


def saved_tensor_hooks() -> Any:
    """The hooks that are given what autograd saves here; None: there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def runs_in_backward() -> bool:
    """Tell whether autograd runs this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x W^T + b by oneDNN, whatever library torch would choose."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def has_onednn_linear() -> bool:
    """Tell whether this build of torch has oneDNN's products."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
