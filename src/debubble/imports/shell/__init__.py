"""An interpreter of launch scripts that follows bash's semantics without running any program."""
