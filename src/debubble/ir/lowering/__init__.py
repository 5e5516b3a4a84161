"""Schedule + costs -> Program: what operations cost, wait for and do to memory, and when they are admitted."""
