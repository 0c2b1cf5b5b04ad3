"""Figures. The only place where Matplotlib is imported, and nobody imports it before a figure is asked for."""
