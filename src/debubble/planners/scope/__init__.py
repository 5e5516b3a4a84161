"""SCOPE: one ILP for recomputation, imbalance and warm-up bubbles, whole and decomposed."""
