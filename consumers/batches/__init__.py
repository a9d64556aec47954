"""Turn samples into rows, and rows into micro-batches."""
