"""The models that the runtime builds: debubble's own units, transformers' modules, and the user's modules."""
