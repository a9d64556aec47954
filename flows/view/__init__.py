"""A run as people see it: a live view, curves and rows of metrics."""
