"""ChronosPipe's figures and sections in the paper's order."""

from __future__ import annotations

from debubble.papers.chronospipe.figures import evaluation, method, scaling
from debubble.papers.registry import Entry, Paper, papers

papers.add(
    "chronospipe",
    Paper(
        name="chronospipe",
        title="ChronosPipe: Temporal Locality in Pipeline Parallelism (arXiv)",
        entries=(
            Entry("Figure 1", "memory under 1F1B, and its first and last stage", method.figure_1),
            Entry("Figure 2", "interleaved 1F1B and orders in groups; sections 2.1 and 2.4", method.figure_2),
            Entry.diagram(
                "Figure 3",
                "forward and backward pass",
                "what is used soon and what late",
                "docs/notes/chronospipe.md says it",
            ),
            Entry.diagram(
                "Figure 4",
                "the parts of ChronosPipe",
                "scheduling, recomputation and offload",
                "docs/notes/chronospipe.md lists them",
            ),
            Entry("Figure 5", "Chronos-Pipe, and its messages", method.figure_5),
            Entry("Figure 6", "Chronos-Recomp, equations (3) and (8)", method.figure_6),
            Entry("Figure 7", "the ZeRO-2 variant", method.figure_7),
            Entry("Figure 8", "Chronos-Offload, equations (4) to (7)", method.figure_8),
            Entry("Figure 9a", "memory and throughput of 48 layers", evaluation.figure_9a),
            Entry("Figure 9b", "the largest models", evaluation.figure_9b),
            Entry("Figure 10", "other ways to recompute", evaluation.figure_10, slow=True),
            Entry("Figure 11", "sequence lengths at PP4", evaluation.figure_11),
            Entry("Figure 12", "other dense models", evaluation.figure_12, slow=True),
            Entry("Figure 13", "the cost of messages", scaling.figure_13),
            Entry("Figure 14", "scaling of Chronos-Offload", scaling.figure_14),
            Entry("Figure 15", "recomputation of more chunks", scaling.figure_15),
            Entry("Figure 16", "offload with more chunks", scaling.figure_16),
        ),
    ),
)
