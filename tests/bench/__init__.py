"""Benchmarks: `python -m tests.bench NAME [--quick]` prints a table and a last line `BENCH NAME {json}`."""
