"""Published planners: the baselines of the four papers, and others of the field."""

from debubble.planners.baselines import adapipe, even_splits, pipeoffload, seq1f1b, zero_bubble

__all__ = ["adapipe", "even_splits", "pipeoffload", "seq1f1b", "zero_bubble"]
