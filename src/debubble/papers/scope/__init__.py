"""SCOPE (Wang et al., DPEXA 2025): one integer program for recomputation, imbalance and warm-up bubbles."""
