"""torch's pipelining: target, export and import."""
