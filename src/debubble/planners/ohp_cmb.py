"""OHP-CMB: 1F1B that recomputes the cheap operators (norm, activation function, multiply) on every stage.

Source: Yuan et al., USENIX ATC 2024 (Megatron-Kwai), as Obscura (USENIX ATC 2025) uses it for a baseline.
"""

from __future__ import annotations

from debubble.planners.dapple import even_1f1b
from debubble.planners.problem import Problem, Solution
from debubble.planners.registry import planner


@planner("ohp-cmb", paper="Megatron-Kwai, ATC 2024")
def ohp_cmb(problem: Problem) -> Solution:
    """1F1B on the even partition, recomputing norms, activation functions and multiplies."""
    return even_1f1b(problem, strategy="cmb")
