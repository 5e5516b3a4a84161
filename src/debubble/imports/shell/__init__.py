"""Launch scripts, read as bash reads them, without running anything."""
