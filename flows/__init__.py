"""Prefect flows, what they are made of, and the command line. May import all other rooms."""
