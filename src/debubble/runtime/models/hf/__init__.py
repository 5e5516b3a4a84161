"""Units of transformers' own modules, and what of them the other units share: names, divisions, initial values."""
