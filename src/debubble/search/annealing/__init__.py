"""Local search over orders, with a compiled evaluator."""
