"""Orders that repeat: modulo scheduling, and the extension of a periodic middle to more micro-batches."""
