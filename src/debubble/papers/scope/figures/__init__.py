"""SCOPE's figures and tables, computed."""
