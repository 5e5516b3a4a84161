"""The private torch functions that the runtime uses, which have no public equivalent.

No other file of the runtime uses private names, except attributes of tensors and modules, which
`tests/runtime/test_torch_internals.py` lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

_aten = torch.ops.aten

# Attention that also returns the logsumexp, by which results of key blocks are merged, and its backward
flash_attention_on_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_on_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward

# RMS norm that saves one number per row, and its backward
fused_rms_norm, fused_rms_norm_backward = _aten._fused_rms_norm, _aten._fused_rms_norm_backward

unsafe_view = _aten._unsafe_view
"""A view that autograd treats as a new tensor, which may be changed in place."""


def strided_shard(dim: int, *, parts: int) -> Any:
    """The DTensor placement of chunk i of each of `parts` equal parts of a dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard  # a slow import that most runs do not need

    return _StridedShard(dim, split_factor=parts)


def saved_tensor_hooks() -> Any:
    """The saved-tensor hooks that are active here; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def runs_in_backward() -> bool:
    """Tell whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x W^T + b by oneDNN, whichever library torch would choose."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def has_onednn_linear() -> bool:
    """Tell whether this build of torch has oneDNN."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
