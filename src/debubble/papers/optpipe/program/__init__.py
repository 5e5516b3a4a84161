"""OptPipe's mixed-integer program, and its solvers."""
