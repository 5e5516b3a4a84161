"""Bytes of model states (weights, gradients, optimizer states) per parameter.

Mixed precision as in Megatron-LM: bf16 weights (2), fp32 gradients (4), fp32 master weights (4) and moments (8 for
Adam): 18 bytes without ZeRO, 6 + 12/n with a distributed optimizer (ZeRO-1) over n ranks.  In fp32 there are no
master weights: 16 bytes.  Post-validation copies what a step changes: master weights and moments once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from debubble.ir import InputError, RunOptions

MOMENTS: Mapping[str, int] = {
    "adamw": 8,
    "adam": 8,
    "adamw-8bit": 2,
    "lion": 4,
    "muon": 4,
    "momentum": 4,
    "sgd": 0,
}
"""Bytes per parameter that each optimizer keeps beside the weights."""

ELEMENT: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number in each dtype."""

HOST_MEMORY_BANDWIDTH = 25e9
"""Bytes per second that the optimizer step of one device gets of its host: an eighth of a two-socket server's."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on one device."""

    weight: float
    gradient: float
    optimizer: float
    summed: float
    """Of a whole gradient, which the ranks that share the parameter sum; 0 if it is not trained."""
    shards: float
    """How many these are."""

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.optimizer

    @property
    def frozen(self) -> ParameterBytes:
        """Of a parameter that is not trained."""
        return replace(self, gradient=0, optimizer=0, summed=0)


def parameter_bytes(options: RunOptions, *, shards: float, gradient_bytes: int) -> ParameterBytes:
    """Bytes per parameter, when `shards` ranks divide what ZeRO divides.

    `gradient_bytes` holds in mixed precision.  Raises InputError for an unknown optimizer, dtype or ZeRO level.
    """
    if options.zero not in (0, 1, 2, 3):
        raise InputError(f"ZeRO has the levels 0, 1, 2 and 3, not {options.zero}.")
    weight = element_bytes(options.dtype)
    mixed = weight == 2
    gradient = gradient_bytes if mixed else 4
    optimizer = moment_bytes(options.optimizer) + (4 if mixed else 0) + copied_bytes(options)
    return ParameterBytes(
        weight=weight / shards if options.zero >= 3 else weight,
        gradient=gradient / shards if options.zero >= 2 else gradient,
        optimizer=optimizer / shards if options.zero >= 1 else optimizer,
        summed=gradient,
        shards=shards,
    )


def copied_bytes(options: RunOptions) -> int:
    """Bytes per parameter of the copies that take an update back: the fp32 parameter and its moments."""
    return moment_bytes(options.optimizer) + 4 if options.post_validation else 0


def step_traffic(options: RunOptions, *, gradient_bytes: int) -> int:
    """Bytes per parameter that an update reads and writes in memory, each once (a fused kernel).

    Every optimizer reads the gradient and reads and writes the fp32 parameter and its moments (`MOMENTS`); in mixed
    precision the parameter is the master copy, and the 16-bit weight is written beside it.  Read + written:

    ==========  ===========================  =====================  =================================================
    optimizer   bf16, fp32 gradients         fp32                   moments, and the source of the update rule
    ==========  ===========================  =====================  =================================================
    sgd         4+4 + 4+2 = 14               4+4 + 4 = 12           none
    momentum    4+4+4 + 4+4+2 = 22           4+4+4 + 4+4 = 20       one in fp32 (torch.optim.SGD)
    lion        22                           20                     one in fp32 (Chen et al., arXiv:2302.06675)
    adam(w)     4+4+8 + 4+8+2 = 30           4+4+8 + 4+8 = 28       two in fp32 (Loshchilov and Hutter, ICLR 2019)
    adamw-8bit  4+4+2 + 4+2+2 = 18           4+4+2 + 4+2 = 16       two in 8 bits (Dettmers et al., ICLR 2022)
    muon        22 + 34 = 56                 20 + 34 = 54           one in fp32, and the orthogonalization
    ==========  ===========================  =====================  =================================================

    Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon) orthogonalizes the momentum in bf16: it writes the
    matrix (2), in each of five Newton-Schulz steps reads it twice and writes it once (5 x 6), and reads the result (2);
    the products of the smaller sides are left out.  With post-validation a copy of what changes, master and moments, is
    read and written too.

    Args:
        options: Optimizer, dtype and post-validation of the run.
        gradient_bytes: Bytes of a gradient in mixed precision; in fp32 it has 4.
    """
    mixed = element_bytes(options.dtype) == 2
    changed = 4 + moment_bytes(options.optimizer)
    gradient, weight = (gradient_bytes, 2) if mixed else (4, 0)
    orthogonalized = 2 + 6 * NEWTON_SCHULZ_STEPS + 2 if options.optimizer == "muon" else 0
    return gradient + 2 * changed + weight + orthogonalized + 2 * copied_bytes(options)


NEWTON_SCHULZ_STEPS = 5
"""Of Muon, by its authors' default."""


def step_operations(options: RunOptions, *, side: int) -> int:
    """Floating-point operations per parameter of an update, beside those that its memory traffic hides.

    Muon alone has them.  A Newton-Schulz step on an n x m matrix, m <= n, takes X X^T, its square, and their sum times
    X: 4 n m^2 + 2 m^3 operations, at most 6 m per parameter (Jordan et al., 2024).

    Args:
        options: The run's optimizer.
        side: The smaller side m of the matrices.
    """
    return 6 * side * NEWTON_SCHULZ_STEPS if options.optimizer == "muon" else 0


def moment_bytes(optimizer: str) -> int:
    """Bytes of a parameter's moments; raises InputError for an unknown optimizer."""
    if optimizer not in MOMENTS:
        raise InputError(f"There is no optimizer '{optimizer}'; there are: {', '.join(MOMENTS)}.")
    return MOMENTS[optimizer]


def element_bytes(dtype: str) -> int:
    """Bytes of a number; raises InputError for an unknown dtype."""
    if dtype not in ELEMENT:
        raise InputError(f"There is no dtype '{dtype}'; there are: {', '.join(ELEMENT)}.")
    return ELEMENT[dtype]
