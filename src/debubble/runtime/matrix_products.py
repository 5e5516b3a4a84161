"""Matrix products, by MKL or oneDNN, whichever is faster on this CPU.

torch uses MKL for fp32, which on CPUs of other vendors than Intel uses half the width of AVX-512; oneDNN, which torch
uses for bf16, uses all of it.  oneDNN has no fp64.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

from debubble.runtime.torch_internals import has_onednn_linear, onednn_linear

MIN_MULTIPLICATIONS = 2**21
"""Minimum number of scalar multiplications for which oneDNN is faster, including the overhead of the call."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b, of x [..., in] and W [out, in]."""
    return onednn_linear(x, weight, bias) if _use_onednn(x, weight) else functional.linear(x, weight, bias)


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute a b, into `out` if it is given."""
    if not _use_onednn(a, b.t()):
        return torch.mm(a, b, out=out)
    result = onednn_linear(a, b.t(), None)
    return result if out is None else out.copy_(result)


def add_product_to(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a b to a tensor, in place."""
    return total.add_(onednn_linear(a, b.t(), None)) if _use_onednn(a, b.t()) else total.addmm_(a, b)


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype is torch.float32
        and x.is_cpu
        and x.numel() * weight.shape[0] >= MIN_MULTIPLICATIONS
        and bool(torch.backends.mkldnn.enabled)
        and _prefers_onednn()
    )


@cache
def _prefers_onednn() -> bool:
    """Tell whether the CPU has AVX-512 and is not Intel's."""
    if not has_onednn_linear() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
