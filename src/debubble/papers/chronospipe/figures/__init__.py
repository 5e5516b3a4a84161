"""ChronosPipe's figures and sections, computed."""
