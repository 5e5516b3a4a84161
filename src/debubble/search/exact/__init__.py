"""Models for exact solvers: CP-SAT, the MILP, and bounds by counting."""
