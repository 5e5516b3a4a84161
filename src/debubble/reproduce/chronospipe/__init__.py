"""ChronosPipe's tables and figures beside ours."""
