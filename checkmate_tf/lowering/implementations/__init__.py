"""Leaner equivalents of what a step computes: rules, and the pass that applies them to a traced graph."""
