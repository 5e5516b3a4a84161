"""What ChronosPipe's figures and sections show, computed."""
