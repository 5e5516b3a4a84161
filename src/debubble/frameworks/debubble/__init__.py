"""debubble's own runtime: what it can run."""
