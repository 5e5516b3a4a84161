"""What SCOPE's figures and tables show, computed."""
