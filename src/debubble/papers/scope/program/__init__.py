"""SCOPE's integer program, solved whole and by decomposition."""
