"""Steps of a pipeline: the batch, forward and backward, updates, and what is measured."""
