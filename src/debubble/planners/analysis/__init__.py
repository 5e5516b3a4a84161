"""Analysis of a plan: its step by cause, what limits it, changes that would help, and frameworks that run it."""
