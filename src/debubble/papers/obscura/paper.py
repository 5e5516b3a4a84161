"""Obscura's figures, tables and sections in the paper's order."""

from __future__ import annotations

from debubble.papers.obscura.figures import evaluation, formulas, motivation, timelines
from debubble.papers.registry import Entry, Paper, papers

papers.add(
    "obscura",
    Paper(
        name="obscura",
        title="Obscura: Concealing Recomputation Overhead in Training of Large Language Models (USENIX ATC 2025)",
        entries=(
            Entry("Abstract", "the largest speed-up", evaluation.abstract, slow=True),
            Entry("Section 1", "what training Llama-2 13B takes", motivation.section_1),
            Entry("Figure 1", "the transformation", timelines.figure_1),
            Entry("Figure 2", "1F1B and its bubbles", timelines.figure_2),
            Entry("Figure 3", "memory under 1F1B", motivation.figure_3),
            Entry("Figure 4", "which bubbles recomputation fills", timelines.figure_4),
            Entry("Figure 5", "computation, bubbles and recomputation of four stages", motivation.figure_5),
            Entry("Figure 6", "the strawman", timelines.figure_6),
            Entry("Table 1", "memory with MLP recomputation", motivation.table_1),
            Entry.diagram(
                "Figure 7",
                "the system's architecture",
                "the planner's and the runtime's parts",
                "docs/architecture.md has ours",
            ),
            Entry("Figure 8", "adjacent stages in the steady phase", timelines.figure_8),
            Entry("Figure 9", "from the strawman to Obscura", timelines.figure_9),
            Entry("Equations (2) to (6)", "time and memory of a step", formulas.closed_forms),
            Entry("Figure 10", "activation swapping, equation (1)", timelines.figure_10),
            Entry("Figure 11", "recomputation against swapping", timelines.figure_11),
            Entry("Algorithm 1", "partition adjustment", formulas.algorithm_1),
            Entry("Section 8", "CMB-Identifying", formulas.section_8),
            Entry("Figure 12", "speed-ups over DAPPLE+", evaluation.figure_12, slow=True),
            Entry("Figure 13", "memory per stage at 28B", evaluation.figure_13),
            Entry("Figure 14", "computing and bubbles at 23B", evaluation.figure_14),
            Entry("Figure 15", "four A800 without NVLink", evaluation.figure_15, slow=True),
            Entry("Figure 16", "the worth of each part", evaluation.figure_16, slow=True),
        ),
    ),
)
