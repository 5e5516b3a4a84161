"""OptPipe's figures and tables, computed."""
