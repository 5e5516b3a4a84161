"""Analysis of a plan that was found: where its seconds go, what binds, what would help, and who else runs it."""
