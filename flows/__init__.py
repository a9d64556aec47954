"""Prefect flows, their parts, and the command line. This package may import all others."""
