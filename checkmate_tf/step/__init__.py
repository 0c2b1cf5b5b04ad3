"""One batch signature from trace to a planned step that runs."""
