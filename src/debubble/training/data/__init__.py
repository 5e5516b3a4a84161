"""Text to batches: tokenizer, data sets, prefetching."""
