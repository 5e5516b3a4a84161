"""ChronosPipe: the search over its settings."""
