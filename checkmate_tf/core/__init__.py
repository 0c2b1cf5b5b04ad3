"""Graphs, schedules, plans, their simulation and their check. NumPy only."""
