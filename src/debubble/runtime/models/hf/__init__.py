"""Units of transformers' modules, with their tensor parallelism and initial weights, and checkpoint names."""
