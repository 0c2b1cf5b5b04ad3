"""Published heuristics to compare with and to start from."""
