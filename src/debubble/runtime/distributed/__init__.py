"""The ranks of a run: what carries tensors between them, and what replicas and tensor parallelism divide."""
