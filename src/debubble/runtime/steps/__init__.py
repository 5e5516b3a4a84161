"""Steps of a pipeline: batches, forward and backward, updates, and measurements."""
