"""Reports of a study: the page, its tables and figures, and the claims' verdicts."""
