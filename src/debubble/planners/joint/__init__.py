"""All levers together: partition, chunks, placement, recomputation, offload and order in one search."""
