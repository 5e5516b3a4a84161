"""OptPipe's tables and figures beside ours."""
