"""From a profiled step and a budget to a plan that keeps it."""
