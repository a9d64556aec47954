"""Benchmarks: `python -m tests.bench NAME [--quick]` prints a table and, last, one line `BENCH NAME {json}`."""
