"""OptPipe (anonymous, under review): the order of operations and offload as one optimisation."""
