"""What Obscura's figures, tables and equations show, computed."""
