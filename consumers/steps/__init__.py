"""Optimizer steps: recorded, taken again, kept in checkpoints and published."""
