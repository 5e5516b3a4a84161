"""The models that the runtime builds: units of its own families, transformers' own modules, and a user's."""
