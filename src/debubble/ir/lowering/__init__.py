"""Schedule + costs -> Program: costs, waits and memory effects of operations, and admission under memory limits."""
