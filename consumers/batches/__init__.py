"""Samples as rows, and rows as micro-batches."""
