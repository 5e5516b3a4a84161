"""Communication between the ranks of a run, and the parallel groups: data, tensor, context and expert."""
